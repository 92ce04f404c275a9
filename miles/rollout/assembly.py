"""Settings, a source and a transport in, the whole rollout side out: the same wiring for the actor and for virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles.config import Settings
from miles.engine.client import EngineClient
from miles.hooks import load_function
from miles.rollout.admission import Bounds
from miles.rollout.buffer_hook import HookedBuffer, HookedFeed
from miles.rollout.core import Core, Encode, adopt, running_loop
from miles.rollout.data_buffer import DataBuffer
from miles.rollout.data_source import NumberedSource
from miles.rollout.evaluation import EvalSet, Evaluates, Evaluator, FunctionEvaluator
from miles.rollout.feed import Feed, WorkerFeed
from miles.rollout.filter_hub.base_types import call_dynamic_filter
from miles.rollout.filter_hub.sample_filter import make_sample_filter
from miles.rollout.function_feed import FunctionFeed
from miles.rollout.generation import GenerateState
from miles.rollout.ledger import Ledger
from miles.rollout.ledger_store import LedgerFile, LedgerStore
from miles.rollout.lineage import RolloutState, StartingPoint
from miles.rollout.rollout_function import RolloutFunction
from miles.rollout.rollouts import Rollouts, WeightPublisher
from miles.rollout.saved_rollouts import SavedFeed
from miles.rollout.scoring import Scoring
from miles.rollout.staleness import Versions
from miles.rollout.staleness_policy import POLICIES
from miles.rollout.worker import Attempts, RolloutWorker, Source

LENGTH_BIAS_BATCHES = 16


def bounds_of(settings: Settings, steps: int | None) -> Bounds:
    """The admission bounds of the run's mode, for ``steps`` training steps (None: without end)."""
    batch = settings.rollout.rollout_batch_size or 1
    return Bounds(
        slots=settings.slots,
        group_size=settings.rollout.n_samples_per_prompt,
        batch_groups=batch,
        buffer_groups=settings.buffer_groups,
        staleness=settings.staleness_bound,
        interval=settings.engine.update_weights_interval,
        ahead_groups=batch if settings.mode == "one_step_off" else None,
        total_groups=None if steps is None else steps * batch,
    )


def length_bias_window(settings: Settings) -> int:
    """Groups that the length bias looks back on."""
    return LENGTH_BIAS_BATCHES * (settings.rollout.rollout_batch_size or 1)


def open_state(
    settings: Settings,
    source: Any,
    folder: Path,
    start: StartingPoint,
    make_store: Callable[[LedgerFile], LedgerStore],
    *,
    durable: bool = True,
) -> RolloutState:
    """The ledger in ``folder`` and the source, both at ``start``. Raises LedgerError and SettingsError as `RolloutState`."""
    return RolloutState(
        source,
        folder,
        start,
        bound=settings.staleness_bound,
        window=length_bias_window(settings),
        by_function=settings.mode == "function",
        make_store=make_store,
        durable=durable,
    )


def make_worker_feed(
    settings: Settings,
    *,
    source: Source,
    state: GenerateState,
    scoring: Scoring,
    ledger: Ledger,
    versions: Versions,
    steps: int | None,
) -> WorkerFeed:
    """A worker, the buffer that it fills, and the feed that drains it."""
    rollout = settings.rollout
    filter_function = load_function(rollout.dynamic_sampling_filter_path)
    bounds = bounds_of(settings, steps)
    buffer = DataBuffer()
    path = rollout.custom_async_data_buffer_path
    hook = HookedBuffer(path, state.args, ledger, buffer) if path else None
    worker = RolloutWorker(
        source=NumberedSource(source, settings.data.data_source_path, rollout.n_samples_per_prompt, ledger.next_id),
        state=state,
        generate=state.generate_function,
        scoring=scoring,
        bounds=bounds,
        attempts=Attempts(
            budget=rollout.rollout_retry_budget,
            timeout_s=rollout.rollout_sample_timeout_s,
            failure_limit=rollout.rollout_failure_limit,
            keeps_tokens=rollout.partial_rollout,
            partial_groups=rollout.rollout_partial_groups,
        ),
        versions=versions,
        ledger=ledger,
        buffer=buffer if hook is None else hook,
        sampling_params=settings.sampling_params(),
        rollout_seed=settings.data.rollout_seed,
        group_rm=settings.reward.group_rm,
        frees_by_sample=rollout.rollout_submission_granularity == "sample",
        keep=(lambda group: call_dynamic_filter(filter_function, state.args, group)) if filter_function else None,
    )
    parts: Any = (worker, buffer, ledger, versions)
    rules: Any = {
        "bounds": bounds,
        "policy": POLICIES[settings.staleness_policy](bounds),
        "retry_unused": settings.retry_unused,
    }
    return WorkerFeed(*parts, **rules) if hook is None else HookedFeed(hook, *parts, **rules)


def assemble(
    settings: Settings,
    *,
    source: Any,
    client: EngineClient,
    publisher: WeightPublisher,
    encode: Encode,
    scoring: Scoring,
    eval_sets: Sequence[EvalSet] = (),
    tokenizer: Any = None,
    steps: range,
    state_of_run: RolloutState | None = None,
    **args: Any,
) -> Rollouts:
    """The rollout side of a run that trains ``steps``; ``args`` are added to the namespace that hooks get.

    ``state_of_run``: its ledger and what was finished before it started; None: nothing is kept, and nothing was.
    """
    versions = Versions()
    ledger = state_of_run.ledger if state_of_run else Ledger(window=length_bias_window(settings))
    core = Core(client, versions, encode, tokenizer, scoring, running_loop())
    adopt(core)
    state = GenerateState(settings.namespace(**args), core)
    shared: RolloutFunction | None = None
    feed: Feed
    if settings.debug.load_debug_rollout_data is not None:
        feed = SavedFeed(settings.debug.load_debug_rollout_data)
    elif settings.mode == "function":
        path = settings.rollout.rollout_function_path or ""
        feed = FunctionFeed(
            load_function(path),
            path,
            state.args,
            source,
            ledger,
            versions,
            batch_groups=settings.rollout.rollout_batch_size or 1,
            ahead=settings.program == "train_async",
            interval=settings.engine.update_weights_interval,
            total_steps=steps.stop,
        )
        shared = feed.function
    else:
        feed = make_worker_feed(
            settings,
            source=source,
            state=state,
            scoring=scoring,
            ledger=ledger,
            versions=versions,
            steps=len(steps),
        )
        if state_of_run is not None:
            feed.restore(state_of_run.finished)
    return Rollouts(
        feed=feed,
        client=client,
        publisher=publisher,
        evaluator=_evaluator(settings, eval_sets, state, scoring, source, shared),
        ledger=ledger,
        versions=versions,
        sample_filter=make_sample_filter(settings.rollout.rollout_sample_filter_path, state.args),
    )


def _evaluator(
    settings: Settings,
    sets: Sequence[EvalSet],
    state: GenerateState,
    scoring: Scoring,
    source: Any,
    shared: RolloutFunction | None,
) -> Evaluates:
    """The user's evaluation function where there is one (``shared`` where training calls the same), else the sets."""
    path = settings.eval.eval_function_path
    if path is not None:
        if shared is None or shared.path != path:
            shared = RolloutFunction(load_function(path), path, state.args, source)
        return FunctionEvaluator(shared, state)
    return Evaluator(
        sets=sets,
        state=state,
        generate=state.generate_function,
        scoring=scoring,
        sampling_params=settings.eval_sampling_params(),
        reward_key=settings.eval_reward_key,
        seed=settings.data.rollout_seed,
        slots=settings.slots,
        budget=settings.rollout.rollout_retry_budget,
        timeout_s=settings.rollout.rollout_sample_timeout_s,
    )
