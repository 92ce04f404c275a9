"""Chat messages in, what is wrong with them or their plain text out: content is text, or a list of text parts."""

from __future__ import annotations

from typing import Any

from miles.types import Message


def message_problem(message: Any) -> str | None:
    """What keeps a message from being rendered, in words that follow its number; None where nothing does."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return 'is no object with a "role"'
    content = message.get("content")
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"has a content of type {type(content).__name__}; text or a list of text parts works"
    for number, part in enumerate(content, start=1):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            what = part.get("type", "untyped") if isinstance(part, dict) else type(part).__name__
            return f'has a part of type "{what}" (part {number}), which can\'t be sent; text parts work'
    return None


def with_plain_text(message: Message) -> Message:
    """The message with its text parts joined: templates of text models take no lists, or print them as they are."""
    content = message.get("content")
    if not isinstance(content, list) or message_problem(message):
        return message
    return message | {"content": "".join(part["text"] for part in content)}
