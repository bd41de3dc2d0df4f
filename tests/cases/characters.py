"""The judgement of ST-01, for any model: characters of several tokens come whole or not at all."""

import json

from tests.cases.case_data import Case
from tests.cases.replies import REPLACEMENT, Reply
from tests.cases.system import System

FORCED = "😀🎉 日本語 naïve"


def assert_characters_are_whole(system: System, case: Case) -> None:
    replies = system.run(case)
    forced = [replies[f"forced text, stream={stream}"] for stream in (True, False)]
    assert_forced(forced)
    for stream in (True, False):
        halves = replies[f"only the first bytes, for ever, stream={stream}"]
        assert halves.finish_reason == "length"
        assert set(halves.text) <= {REPLACEMENT}
        paris = replies[f"five times ' Paris', stream={stream}"]
        assert paris.text == " Paris Paris Paris Paris Paris"
    assert replies["only the first bytes, for ever, stream=False"].usage["completion_tokens"] == 5
    for reply in replies.values():
        system.assert_twin_agrees(reply)
    replies.assert_all_judged()


def assert_forced(replies: list[Reply]) -> None:
    for reply in replies:
        assert reply.status == 200, reply
        assert json.loads(reply.text) == FORCED
        assert reply.finish_reason == "stop"
    streamed = next(reply for reply in replies if reply.is_stream)
    assert all(REPLACEMENT not in piece for piece in streamed.pieces())
    assert len({reply.text for reply in replies}) == 1
