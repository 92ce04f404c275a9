"""Laws of rendering: one BOS, one renderer for everything, and a clear word where a template is missing."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from miles.data.messages import message_problem
from miles.data.render import PromptEncoder, load_tokenizer
from miles.errors import SettingsError
from tests.real_engine import MODEL
from tests.virtual import settings_of

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}tool {{ tool['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}{% if thinking %} think{% endif %}"
)
WORDS = ["<s>", "</s>", "[UNK]", "a", "b", "user", "assistant", "tool", "think"]
BOS, EOS, A, B, USER, ASSISTANT, TOOL, THINK = 0, 1, 3, 4, 5, 6, 7, 8


def tokenizer(*, adds="<s> $A", template=TEMPLATE, bos="<s>"):
    """Words as tokens; ``adds`` is what encoding puts around a text, as Llama's tokenizer puts its BOS."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds:
        words.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=bos, eos_token="</s>", unk_token="[UNK]")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("text", ["a b", "<s> a b", "<s>a b"])
def test_exactly_one_bos(text):
    assert PromptEncoder(tokenizer()).encode(text) == [BOS, A, B]


def test_exactly_one_bos_in_a_rendered_prompt():
    messages = [{"role": "user", "content": "a"}]
    assert PromptEncoder(tokenizer(), apply_chat_template=True).encode(messages) == [BOS, USER, A, ASSISTANT]


def test_no_eos_after_a_prompt():
    assert PromptEncoder(tokenizer(adds="<s> $A </s>")).encode("a b") == [BOS, A, B]


@pytest.mark.parametrize("bos", ["<s>", None])
def test_no_bos_where_the_tokenizer_adds_none(bos):
    assert PromptEncoder(tokenizer(adds=None, bos=bos)).encode("a b") == [A, B]


def test_text_is_one_user_message_to_a_template():
    encoder = PromptEncoder(tokenizer(), apply_chat_template=True)
    assert encoder.encode("a b") == encoder.encode([{"role": "user", "content": "a b"}])


def test_template_arguments_reach_the_template():
    quiet = PromptEncoder(tokenizer(), True, {"add_generation_prompt": False})
    loud = PromptEncoder(tokenizer(), True, {"thinking": True, "tokenize": True})
    assert quiet.encode("a") == [BOS, USER, A]
    assert loud.encode("a") == [BOS, USER, A, ASSISTANT, THINK]


def test_tools_count_where_a_prompt_is_measured():
    """verl#2069: a prompt that fits without its tools and not with them."""
    encoder = PromptEncoder(tokenizer(), apply_chat_template=True)
    assert encoder.encode("a", tools=[{"name": "b"}]) == [BOS, TOOL, B, USER, A, ASSISTANT]
    assert len(encoder.encode("a")) == 4


def test_messages_without_a_template_name_the_flag():
    with pytest.raises(SettingsError, match="--apply-chat-template is not set"):
        PromptEncoder(tokenizer()).encode([{"role": "user", "content": "a"}])


def test_template_flag_without_a_template_is_refused_at_start():
    with pytest.raises(SettingsError, match="has no chat template"):
        PromptEncoder(tokenizer(template=None), apply_chat_template=True)


def parts(*texts):
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def test_text_parts_of_a_content_list_are_one_text():
    encoder = PromptEncoder(tokenizer(), apply_chat_template=True)
    assert encoder.encode(parts("a ", "b")) == encoder.encode([{"role": "user", "content": "a b"}])
    message = parts("a")
    encoder.encode(message)
    assert message == parts("a")


@pytest.mark.parametrize(("message", "said"), [
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, 'type "image_url" (part 1)'),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, 'type "image" (part 2)'),
    ({"role": "user", "content": ["a"]}, 'type "str" (part 1)'),
    ({"role": "user", "content": 5}, "content of type int"),
    ({"content": "a"}, 'no object with a "role"'),
])  # fmt: skip
def test_what_can_not_be_sent_is_named(message, said):
    assert said in message_problem(message)


@pytest.mark.parametrize("message", [
    parts("a")[0], {"role": "assistant", "content": None, "tool_calls": []}, {"role": "user", "content": ""},
])  # fmt: skip
def test_text_and_calls_can_be_sent(message):
    assert message_problem(message) is None


def test_a_template_file_takes_the_place_of_the_tokenizer_s(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}{{ m['content'] }} think{% endfor %}")
    flags = f"--hf-checkpoint {MODEL} --apply-chat-template"
    settings = settings_of(f"{flags} --chat-template-path {path}")
    encoder = PromptEncoder.from_settings(settings, load_tokenizer(settings))
    assert encoder.render("a b") == "a b think"
    own, autofix = settings_of(flags), settings_of(f"{flags} --chat-template-path autofix")
    assert load_tokenizer(autofix).chat_template == load_tokenizer(own).chat_template
