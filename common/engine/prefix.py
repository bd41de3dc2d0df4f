"""How much of a prompt a prefix-cache hit may save: one rule for prefill and decode."""


def usable_prefix(num_prompt_tokens: int, matched_blocks: int, block_size: int) -> int:
    """Tokens whose KV is taken from the cache: whole blocks, and never the whole prompt.

    At least the last prompt token is computed again, because its logits choose the first output token and
    the cache holds KV only.
    """
    assert num_prompt_tokens > 0 and matched_blocks >= 0, f"{num_prompt_tokens} tokens, {matched_blocks} blocks"
    return min(matched_blocks, (num_prompt_tokens - 1) // block_size) * block_size
