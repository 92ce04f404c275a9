"""The report is one page that needs nothing but itself, and shows text as text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from miles.observe.plots import draw_all
from miles.observe.report import write_report
from miles.observe.run_folder import RunFolder

VOID = {"meta", "img"}


class Page(HTMLParser):
    """Tags, their attributes and the text; fails on a tag that isn't closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data + "\n"


@pytest.fixture
def folder(tmp_path: Path, clock: Any) -> RunFolder:
    folder = RunFolder(tmp_path / "my <run>", clock)
    settings = {"train": {"lr": 1e-5, "clip_grad": 1.0}, "eval": {"eval_prompt_data": ["aime", "a.jsonl"]}}
    folder.write_settings(json.dumps({**settings, "given": ["eval_prompt_data", "lr"]}))
    folder.append_event("started")
    for step, accuracy in ((0, 0.1), (10, 0.6), (20, 0.5)):
        folder.append_eval(step, {"eval/aime": accuracy, "eval/aime-truncated_ratio": 0.0})
    for step in (1, 2):
        clock.advance(60)
        folder.append_step(step, {"rollout/raw_reward": step / 10, "rollout/trained_tokens": 1e6, "train/loss": 0.25})
    folder.append_event("group_given_up", reason="<script>alert(1)</script>")
    return folder


def page(folder: RunFolder) -> Page:
    return Page(write_report(folder.path).read_text(encoding="utf-8"))


def test_page_needs_nothing_but_itself(folder: RunFolder) -> None:
    drawn = draw_all(folder.path)
    report = page(folder)
    assert report.tags.count("img") == len(drawn) > 0
    assert all(source.startswith("data:image/png;base64,") for source in report.sources)
    assert not {"script", "link", "iframe"} & set(report.tags)
    html = (folder.path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import", html)


def test_headline_has_last_and_best_evaluation_steps_time_and_tokens(folder: RunFolder) -> None:
    text = page(folder).text.split("\n")
    for shown in ("aime, step 20", "0.5", "best 0.6 at step 10", "first 0.1", "2", "2m 00s", "2M"):
        assert shown in text


def test_newest_metrics_given_settings_and_events_are_listed(folder: RunFolder) -> None:
    text = page(folder).text.split("\n")
    for name, value in (("train/loss", "0.25"), ("lr", "1e-05"), ("eval_prompt_data", "aime a.jsonl")):
        assert text[text.index(name) + 1] == value
    assert "clip_grad" not in text
    assert "1 × started, 1 × group given up" in text


def test_text_of_the_run_is_shown_not_interpreted(folder: RunFolder) -> None:
    folder.append_eval(30, {"eval/<i>": 0.5, "eval/<i>-truncated_ratio": 0.0})
    folder.append_event("closed", cause="<b>bold</b> & more")
    report = page(folder)
    assert "my <run>" in report.text
    assert "<script>alert(1)</script>" in report.text
    assert "eval/<i>" in report.text and "<i>, step 30" in report.text
    assert report.text.count("<b>bold</b> & more") == 2, "in the status and among the events"


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "still running, or killed"),
        ([("closed", {"cause": None})], "finished"),
        ([("closed", {"cause": "no engine"})], "stopped"),
        ([("closed", {"cause": None}), ("started", {})], "still running, or killed"),
    ],
)
def test_status_is_that_of_the_last_process(folder: RunFolder, events: list[Any], status: str) -> None:
    for kind, fields in events:
        folder.append_event(kind, **fields)
    assert status in page(folder).text


def test_run_that_recorded_nothing_has_a_report(tmp_path: Path) -> None:
    report = page(RunFolder(tmp_path / "empty"))
    assert "empty" in report.text and "img" not in report.tags
