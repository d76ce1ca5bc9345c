"""Between text and token ids, from the files of a model folder, without torch.

transformers' AutoTokenizer would do the same, but takes 2 s and imports torch into a process that needs neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer and its chat template."""

    encoder: Any
    """`tokenizers.Tokenizer`."""
    template: Any
    """Compiled jinja2 template."""
    special: dict[str, str]
    """bos_token, eos_token and their like, which templates refer to."""
    stop_ids: frozenset[int]
    """Token ids that end a reply."""


def load_tokenizer(folder: str | Path) -> ChatTokenizer:
    """Read tokenizer.json, the chat template and the stop tokens of a model folder.

    Raises:
        ValueError: a file is missing or holds no chat template or stop token; the message names it.
    """
    from tokenizers import Tokenizer

    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
    config = _read_json(folder / "tokenizer_config.json")
    return ChatTokenizer(
        encoder=Tokenizer.from_file(str(folder / "tokenizer.json")),
        template=compile_template(_template(folder, config)),
        special={key: _content(value) for key, value in config.items() if key.endswith("_token") and value},
        stop_ids=frozenset(stop_token_ids(folder)),
    )


def compile_template(source: str) -> Any:
    """A chat template with what transformers offers to one, except the clock: prompts must not change overnight."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks replies for loss masks, which are made from what was sampled instead."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json, as a tuple."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    raise ValueError(f"{folder} names no eos_token_id, so no reply could end; set it in generation_config.json")


def render_prompt(tokenizer: ChatTokenizer, system: str, question: str) -> list[int]:
    """Token ids of a conversation with one question, up to where the reply begins; no system message when empty."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    text = tokenizer.template.render(messages=messages, add_generation_prompt=True, **tokenizer.special)
    try:
        ids = tokenizer.encoder.encode(text, add_special_tokens=False).ids
    except Exception as err:  # the library raises nothing more specific
        raise ValueError(f"the model's tokenizer cannot encode {text!r} ({err}); use characters that it knows") from err
    if not ids:
        raise ValueError(f"the prompt for {question!r} has no tokens; check the chat template")
    return ids


def decode(tokenizer: ChatTokenizer, ids: list[int] | tuple[int, ...]) -> str:
    """Text of a reply without its stop token; a special token elsewhere stays visible, so it can't join two numbers."""
    end = len(ids) - 1 if ids and ids[-1] in tokenizer.stop_ids else len(ids)
    return tokenizer.encoder.decode(list(ids[:end]), skip_special_tokens=False)


def _template(folder: Path, config: dict[str, Any]) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    if isinstance(config.get("chat_template"), str):
        return config["chat_template"]
    raise ValueError(f"{folder} has no chat template; add chat_template.jinja, or use an instruction-tuned model")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _content(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else value


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter writes < and > as escapes, for web pages
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"the chat template refuses the conversation: {message}; change data.system or the template")
