"""What tensorboard reads back is what was logged, late evaluations included, and none of it needs torch."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.observe.trackers import TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_late_evaluation_is_kept_beside_training(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker.log(5, {"train/loss": 0.5, "train/kl": math.nan})
    tracker.log(4, {"eval/aime": 0.25})
    tracker.log(6, {"train/loss": 0.25})
    tracker.log(2, {"eval/aime": 0.125})
    tracker.close()
    read = scalars(tmp_path)
    assert read["train/loss"] == [(5, 0.5), (6, 0.25)]
    assert read["eval/aime"] == [(4, 0.25), (2, 0.125)]
    assert math.isnan(read["train/kl"][0][1])


def test_resumed_run_replaces_the_steps_it_takes_again(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, clock=lambda: 100.0)
    for step in (1, 2, 3):
        first.log(step, {"train/loss": float(step)})
    first.close()
    second = TensorBoard(tmp_path, start_step=2, clock=lambda: 200.0)
    second.log(3, {"train/loss": 30.0})
    second.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_observing_needs_no_torch_and_draws_without_a_screen(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import miles.observe.observer; "
        "light = sorted({'torch', 'numpy', 'matplotlib', 'tensorboard'} & set(sys.modules)); "
        "from miles.observe.trackers import TensorBoard; from miles.observe.run_folder import RunFolder; "
        "folder = Path(sys.argv[1]); tracker = TensorBoard(folder / 'tb'); tracker.log(1, {'a': 1.0}); tracker.close(); "
        "RunFolder(folder).append_step(1, {'train/loss': 0.5}); from miles.observe.plots import draw_all; draw_all(folder); "
        "print(light, sorted({'torch', 'tensorflow', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
