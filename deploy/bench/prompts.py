"""Makes prompts of an exact number of tokens, from a seed: token ids, or words for servers that take only text."""

from random import Random

from deploy.bench.workload import TRACE_BLOCK_TOKENS, Shape

# Common enough to be one token (with the space before) in the vocabularies of today's models.
WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea kid body
    information back parent face others level office door health person art war history party result change morning
    reason research girl guy moment air teacher force education
""".split()  # noqa: SIM905  # a list of a hundred strings would hide them


class Prompts:
    """Prompts of one run. The same seed gives the same prompts; two seeds share no prefix.

    Args:
        seed: of everything drawn here.
        shared_prefix: leading tokens that all prompts have in common; 0: no two prompts begin alike.
        token_range: ids to draw from, [low, high): ordinary tokens of any vocabulary that has so many.
    """

    def __init__(self, seed: str, shared_prefix: int = 0, token_range: tuple[int, int] = (1000, 30000)) -> None:
        self._seed = seed
        self._shared_prefix = shared_prefix
        self._low, self._high = token_range

    def token_ids(self, index: int, shape: Shape) -> list[int]:
        """The prompt of request `index`: exactly `shape.prompt_tokens` ids."""
        numbers = self._numbers(index, shape, self._high - self._low)
        return [self._low + number for number in numbers]

    def text(self, index: int, shape: Shape) -> str:
        """The same as words: about one token each; the server's usage tells how many they were."""
        return " ".join(WORDS[number] for number in self._numbers(index, shape, len(WORDS)))

    def _numbers(self, index: int, shape: Shape, bound: int) -> list[int]:
        numbers: list[int] = []
        for block in shape.blocks:
            numbers += self._draw(f"block {block}", TRACE_BLOCK_TOKENS, bound)
        if not shape.blocks and self._shared_prefix:
            numbers += self._draw("shared", self._shared_prefix, bound)
        missing = max(0, shape.prompt_tokens - len(numbers))
        numbers += self._draw(f"request {index}", missing, bound)
        return numbers[: shape.prompt_tokens]

    def _draw(self, what: str, count: int, bound: int) -> list[int]:
        random = Random(f"{self._seed} {what}")
        return random.choices(range(bound), k=count)
