"""Tool use, token for token: what was sampled stays, what tools say is what the template writes, and no limit is passed."""

import asyncio
import json
import string
from collections import deque

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from miles.config import Problems, Settings
from miles.data.render import PromptEncoder
from miles.engine.fake import FakeEngine, FakeFleet, Raw
from miles.errors import HookError
from miles.hooks import function_registry
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.check import check
from miles.rollout.core import Core, make_client
from miles.rollout.generate_hub import multi_turn
from miles.rollout.generate_hub.tool_calls import PARSERS, BadCall, ToolCall
from miles.rollout.generation import GenerateState
from miles.rollout.scoring import DirectScoring
from miles.rollout.staleness import Versions
from miles.sim import clock
from miles.types import Sample
from tests.virtual import settings_of

TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>{{ m.content }}"
    "</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS, END = "<s>", "<|im_end|>"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "%s"}}</tool_call>'


def toy_tokenizer():
    """Characters, with merges that read "hello" as one token, and a BOS before whatever is encoded with special tokens."""
    letters = [*string.printable]
    vocab = {piece: i for i, piece in enumerate([*letters, "he", "ll", "llo", "hello"])}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (BOS, END, "<|im_start|>")])
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=END)
    made.chat_template = TEMPLATE
    return made


TOKENIZER = toy_tokenizer()
IDS = {word: TOKENIZER.convert_tokens_to_ids(word) for word in ("he", "llo", "hello", BOS, END)}


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def turn(text, *, ids=None, finish="stop", version="1"):
    """A reply that samples ``text`` with the end of its turn, where it stops."""
    ids = ids_of(text) if ids is None else ids
    ids = [*ids, IDS[END]] if finish == "stop" else ids
    meta = {"finish_reason": {"type": finish}, "weight_version": version}
    return Raw({"text": text, "meta_info": meta | {"output_token_logprobs": [[-0.5, i, None] for i in ids]}})


def converse(*turns, execute=None, limit=10_000, max_turns=16, sample=None, parser="hermes"):
    """(the sample, what the engine was asked, what the tools were)."""
    engine = FakeEngine(script=deque(turns))
    flags = f"--fully-async --custom-generate-function-path {multi_turn.PATH} --apply-chat-template "
    flags += (
        f"--rollout-max-response-len {limit} --generate-max-turns {max_turns} --generate-tool-call-parser {parser} "
    )
    settings = settings_of(flags + "--generate-execute-tool-function-path user.execute")
    asked = []

    async def look(name, arguments):
        asked.append((name, arguments))
        await asyncio.sleep(2)
        return f"contents of {arguments['at']}"

    async def main():
        client = make_client(settings, FakeFleet({"http://e:1": engine}))
        client.table.add_fixed("http://e:1")
        versions = Versions()
        versions.raise_to(3, 1)
        encode = PromptEncoder.from_settings(settings, TOKENIZER).encode
        state = GenerateState(settings.namespace(), Core(client, versions, encode, TOKENIZER, DirectScoring(float)))
        given = sample or Sample(index=7, prompt=[{"role": "user", "content": "hello"}])
        given.submit_version = 3
        return (await multi_turn.generate(GenerateFnInput(state, given, settings.sampling_params()))).samples

    with function_registry.temporary("user.execute", execute or look):
        done = clock.run(main())
    done.validate()
    return done, engine.requests, asked


def masked(sample):
    """The response as (mask, text) stretches."""
    stretches = []
    for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True):
        if not stretches or stretches[-1][0] != mask:
            stretches.append((mask, []))
        stretches[-1][1].append(token)
    return [(mask, TOKENIZER.decode(ids)) for mask, ids in stretches]


def test_sampled_ids_are_kept_and_the_next_prompt_goes_on_from_them():
    """T1: "he", "llo" stay two tokens where encoding their text again would give one."""
    first = [IDS["he"], IDS["llo"], *ids_of(CALL % "a")]
    sample, requests, _ = converse(turn("hello" + CALL % "a", ids=first), turn("done"))
    before, after = requests[0]["input_ids"], requests[1]["input_ids"]
    assert after[: len(before) + len(first) + 1] == [*before, *first, IDS[END]]
    assert sample.tokens == [*after, *ids_of("done"), IDS[END]]
    assert sample.status is Sample.Status.COMPLETED


@pytest.mark.parametrize("ends", [True, False])
def test_the_conversation_is_what_the_template_would_write(ends):
    """T5, T6, M3: two results in one user turn, the newline after the end of a turn, exactly one BOS (T3)."""
    calls = CALL % "a.py" + CALL % "b.py"
    reply = turn(calls)
    if not ends:
        reply.body["meta_info"]["output_token_logprobs"].pop()
    sample, requests, asked = converse(reply, turn("done"))
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": calls},
        {"role": "tool", "content": "contents of a.py"},
        {"role": "tool", "content": "contents of b.py"},
    ]
    full = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert TOKENIZER.decode(requests[1]["input_ids"]) == full
    assert sample.tokens.count(IDS[BOS]) == 1
    assert asked == [("look", {"at": "a.py"}), ("look", {"at": "b.py"})]
    assert [mask for mask, _ in masked(sample)] == [1, 0, 1]
    assert masked(sample)[1][1].startswith("\n" if ends else END + "\n")
    zeros = [p for p, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not m]
    assert set(zeros) == {0.0} and sample.effective_response_length == sample.response_length - len(zeros)
    assert sample.non_generation_time == 4.0


def test_versions_are_those_of_the_turns():
    sample, _, _ = converse(turn(CALL % "a", version="1"), turn(CALL % "b", version="1"), turn("done", version="2"))
    assert sample.weight_versions == ["1", "1", "2"]
    covered = [at for span in sample.version_spans for at in range(span.start, span.end)]
    assert covered == [at for at, mask in enumerate(sample.loss_mask) if mask]


def test_the_limit_holds_for_all_turns_together():
    """V3: each request asks for what is left; results that leave nothing are not appended."""
    first = len(ids_of(CALL % "a")) + 1
    _, requests, _ = converse(turn(CALL % "a"), turn("done"), limit=first + 200)
    assert requests[1]["sampling_params"]["max_new_tokens"] < 200
    result = len(requests[1]["input_ids"]) - len(requests[0]["input_ids"]) - first
    assert requests[1]["sampling_params"]["max_new_tokens"] == 200 - result
    for room, asked in ((result + 1, 2), (result, 1), (0, 1)):
        sample, requests, _ = converse(turn(CALL % "a"), turn("!", finish="length"), limit=first + room)
        assert sample.status is Sample.Status.TRUNCATED and len(requests) == asked
        assert sample.response_length <= first + room
        assert (0 in sample.loss_mask) is (asked == 2)


def test_a_turn_cut_off_inside_a_call_is_truncated_and_runs_nothing():
    """Script 10."""
    sample, _, asked = converse(turn((CALL % "a")[:30], finish="length"))
    assert sample.status is Sample.Status.TRUNCATED and asked == []


def test_an_aborted_turn_goes_on_inside_itself():
    """Script 7: abort after part of a call, then the rest: the call is read across both."""
    text = CALL % "a"
    sample, _, _ = converse(turn(text[:20], finish="abort"))
    assert sample.status is Sample.Status.ABORTED
    sample, requests, asked = converse(turn(text[20:]), turn("done"), sample=sample)
    assert asked == [("look", {"at": "a"})] and len(requests) == 2
    assert sample.status is Sample.Status.COMPLETED


def test_turns_end_with_the_last_one():
    sample, requests, asked = converse(turn(CALL % "a"), turn(CALL % "b"), max_turns=2)
    assert (len(requests), len(asked)) == (2, 1)
    assert sample.status is Sample.Status.COMPLETED and sample.loss_mask[-1] == 1


def test_a_call_that_cannot_be_read_is_answered_with_why():
    sample, _, asked = converse(turn("<tool_call>{oops</tool_call>"), turn("done"))
    assert asked == [] and "the tool call is no JSON" in masked(sample)[1][1]


def test_a_tool_that_fails_names_hook_sample_and_line():
    def execute(name, arguments):
        raise OSError("no such host")

    with pytest.raises(
        HookError, match=r"user\.execute failed on sample 7, tool look: OSError: .*test_multi_turn.py:\d+"
    ):
        converse(turn(CALL % "a"), execute=execute)
    with pytest.raises(HookError, match=r"user\.execute returned 3 for tool look; a str works"):
        converse(turn(CALL % "a"), execute=lambda name, arguments: 3)


AB = [ToolCall("f", {"x": 1}), ToolCall("g", {})]


@pytest.mark.parametrize(("parser", "text", "calls"), [
    ("hermes", 'Let me.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "g"}', AB),
    ("qwen25", "no call", []),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}<|eom_id|>', AB),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}', AB[:1]),
    ("llama3", "I think {x} is 3", []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]</s>', AB),
    ("mistral", "text", []),
])  # fmt: skip
def test_parsers(parser, text, calls):
    assert PARSERS[parser](text) == calls


@pytest.mark.parametrize("body", ["{", "[]", '{"name": 3}', '{"name": "f", "arguments": "x"}'])
def test_calls_that_are_none(body):
    assert all(isinstance(c, BadCall) for c in PARSERS["hermes"](f"<tool_call>{body}</tool_call>"))
    assert len(PARSERS["hermes"](f"<tool_call>{body}</tool_call>")) == 1


def test_settings_are_checked_at_start():
    problems = Problems()
    words = "--fully-async --rollout-batch-size 2 --rollout-max-response-len 8 "
    words += f"--custom-generate-function-path {multi_turn.PATH}"
    settings = Settings.parse([*words.split(), "--generate-tool-call-parser", "hermess"], problems)
    check(settings, problems)
    said = "\n".join(problems.lines)
    assert "--generate-tool-call-parser hermess: is no parser that there is; one of hermes, qwen" in said
    assert "--generate-execute-tool-function-path is not set: nothing runs the tools" in said
    assert "with --apply-chat-template it works" in said


def test_arguments_reach_tools_as_they_were_written():
    body = json.dumps({"name": "f", "arguments": {"text": 'ü\n"quoted"'}})
    assert PARSERS["hermes"](f"<tool_call>{body}</tool_call>") == [ToolCall("f", {"text": 'ü\n"quoted"'})]
