"""Chat templates of several kinds over one small tokenizer, for the tests of sessions."""

from __future__ import annotations

import random
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from furlong.ops.protocols import Sample
from furlong.ops.sessions.template import ChatTemplate
from furlong.ops.tasks.render import ChatTokenizer, compile_template

CALLS = """{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}"""

CHATML = (
    """{%- if tools %}<|im_start|>system
{{ messages[0].content + '\\n' if messages[0].role == 'system' else '' }}Tools:{% for tool in tools %} {{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}

<tool_response>
{{ message.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}"""
    + CALLS
    + """<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)
"""The end of a turn is a stop token and a newline; tool answers side by side are one user turn."""

HEADERS = """{%- macro header(role) %}<|start|>{{ role }}<|sep|>

{% endmacro -%}
<|begin|>
{%- for message in messages %}
{{- header('ipython' if message.role == 'tool' else message.role) }}
{%- if loop.first and tools %}Tools: {{ tools | tojson }}

{% endif %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{{- {"name": call.function.name, "parameters": call.function.arguments} | tojson }}
{%- endfor %}<|eom|>
{%- else %}{{ message.content | trim }}<|eot|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""
"""No white space after the end of a turn, another stop token after tool calls, trimmed text."""

SPEAKERS = (
    """[gMASK]<sop>{% if tools %}<|system|>
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}

<tool_response>{{ message.content }}</tool_response>
{%- elif message.role == 'assistant' %}<|assistant|>
{{ message.content }}"""
    + CALLS
    + """{% else %}<|{{ message.role }}|>
{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
)
"""A turn is ended by the next speaker's header, which is a stop token."""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "speakers": SPEAKERS}
STOPS = {
    "chatml": ("<|im_end|>", "<|endoftext|>"),
    "headers": ("<|eot|>", "<|eom|>"),
    "speakers": ("<|user|>", "<|observation|>", "<|endoftext|>"),
}
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|sep|>", "<|eot|>", "<|eom|>", "[gMASK]",
    "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
CORPUS = [
    "the answer is forty two and the tool says hello to the user again",
    '{"name": "add", "arguments": {"a": 12}}',
]


@cache
def small_tokenizer() -> Tokenizer:
    """Byte-level BPE with some merges, so that one text has many token sequences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def make_template(kind: str) -> ChatTemplate:
    encoder = small_tokenizer()
    stops = frozenset(encoder.token_to_id(text) for text in STOPS[kind])
    return ChatTemplate(ChatTokenizer(encoder, compile_template(TEMPLATES[kind]), {}, stops))


def spell(template: ChatTemplate, text: str, rng: random.Random) -> list[int]:
    """Token ids that decode to the text, but not those that encoding it would give: cut at random places."""
    ids, at = [], 0
    while at < len(text):
        size = rng.randint(1, 4)
        ids += template.tokenizer.encoder.encode(text[at : at + size], add_special_tokens=False).ids
        at += size
    return ids


def make_sample(ids: list[int], reason: str = "stop", name: str = "r", version: int = 0) -> Sample:
    """A sample with log-probabilities that tell its tokens apart."""
    return Sample(
        request_id=name,
        tokens=tuple(ids),
        logprobs=tuple(-0.01 * (1 + at) for at in range(len(ids))),
        model_logprobs=tuple(-0.02 * (1 + at) for at in range(len(ids))),
        versions=((version, 0, len(ids)),),
        finish_reason=reason,
        seconds=1.0,
    )


def say(template: ChatTemplate, text: str, stop: str | None = None, rng: random.Random | None = None) -> Sample:
    """A sampled reply that reads `text`, ended by a stop token of the template."""
    encoder = template.tokenizer.encoder
    ids = spell(template, text, rng) if rng else encoder.encode(text, add_special_tokens=False).ids
    end = encoder.token_to_id(stop) if stop else min(template.stop_ids)
    return make_sample([*ids, end])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
