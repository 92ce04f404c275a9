"""The rooms as Ray actors: thin faces, so that the classes inside know nothing of Ray.

EngineActor    one engine process, watched; tells the rollout actor when it comes and goes
RolloutActor   `Rollouts` on the actor's own event loop, with the gateway beside it
TrainerActor   one `TrainerRank`
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import ray

from miles import loops
from miles.cluster.engine_process import EngineProcess
from miles.config import Settings
from miles.data.render import PromptEncoder, load_tokenizer
from miles.engine.backends import Backend
from miles.engine.gateway import Gateway
from miles.engine.http import HttpTransport
from miles.engine.launch import model_context
from miles.errors import SettingsError
from miles.observe.metrics import category_metrics, eval_metrics, passrate_metrics, rollout_metrics
from miles.rollout import fully_async_rollout
from miles.rollout.assembly import assemble, open_state
from miles.rollout.conversion import to_train_data
from miles.rollout.convert_hook import convert
from miles.rollout.core import make_client, make_scorer
from miles.rollout.data_source import eval_sets, make_data_source, skipped_rows
from miles.rollout.evaluation import eval_groups
from miles.rollout.feed import WorkerFeed
from miles.rollout.ledger_store import ThreadStore
from miles.rollout.lineage import StartingPoint
from miles.rollout.log_functions import log_evaluation, log_rollout
from miles.rollout.post_process import post_process
from miles.rollout.rm_hub.rewards import Rewards
from miles.rollout.saved_rollouts import save_groups
from miles.types import Weights, iter_samples
from miles.weights.publish import Publisher

BIASES = {"length_bias": "rollout/length_bias", "masked_length_bias": "rollout/masked_length_bias"}
SKIPPED = "rollout/skipped_long_prompts"


def given_up_metric(reason: str) -> str:
    """The name under which groups that were given up for ``reason`` are counted."""
    if reason.startswith("filtered"):
        return f"rollout/dynamic_filter/drop{reason.removeprefix('filtered')}"
    return {
        "stale": "rollout/fully_async/stale_groups_filtered",
        "aborted": "rollout/fully_async/aborted_groups_filtered",
    }.get(reason, f"rollout/given_up/{reason}")


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EngineSide:
    """Starts an engine beside itself, and again whenever it dies."""

    def __init__(self, settings: Settings, backend: Backend, model: str, log: str) -> None:
        port = free_port()
        self._engine = EngineProcess(
            backend.launch(settings, model=model, port=port, extra=backend.passed_on(settings.passthrough)),
            f"http://127.0.0.1:{port}",
            Path(log),
            start_timeout_s=settings.engine.engine_start_timeout_s or backend.start_timeout_s,
            health_interval_s=settings.engine.rollout_health_check_interval,
            health_timeout_s=settings.engine.rollout_health_check_timeout,
        )
        self._running: asyncio.Task[None] | None = None

    async def run(self, rollouts: Any) -> None:
        """Until `stop`. Raises when the engine can't be started."""

        async def up(url: str) -> None:
            await rollouts.engine_up.remote(url, self._engine.pid, self._engine.restarts)

        async def down(url: str, why: str) -> None:
            await rollouts.engine_down.remote(url, why)

        async with asyncio.TaskGroup() as tasks:
            self._running = tasks.create_task(self._engine.run(up, down))

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
        await self._engine.stop()


class RolloutSide:
    """The rollout side of the ring. `start`, then `run` beside everything else."""

    def __init__(self, settings: Settings, backend: Backend, steps: range) -> None:
        self._settings = settings
        self._backend = backend
        self._steps = steps
        self._events: list[dict[str, Any]] = []
        self._lost: Counter[str] = Counter()
        self._client = make_client(settings, backend.adapt(HttpTransport()))
        self._table = self._client.table

    async def start(self, home: str, begins: StartingPoint) -> str:
        """Reads the data and the ledger in ``home``, starts the reward processes and the gateway.

        Returns the gateway's address.
        """
        loops.adopt(asyncio.get_running_loop())
        settings = self._settings
        tokenizer = load_tokenizer(settings)
        encoder = PromptEncoder.from_settings(settings, tokenizer)
        client = self._client
        self._gateway = Gateway(client, host=settings.engine.sglang_router_ip, port=settings.engine.sglang_router_port)
        try:
            port = await self._gateway.start()
        except OSError as error:
            where = f"{settings.engine.sglang_router_ip}:{settings.engine.sglang_router_port}"
            raise SettingsError(
                [f"--sglang-router-port: {where} can't be served ({error.strerror}); 0 takes a free port"]
            ) from error
        context = settings.sampling.rollout_max_context_len or model_context(settings.model.hf_checkpoint)
        more = {"sglang_router_port": port, "rollout_max_context_len": context}
        self._args = args = settings.namespace(**more)
        self._source = make_data_source(args, settings.data.data_source_path)
        self._state = open_state(settings, self._source, Path(home), begins, ThreadStore)
        self._tell_lineage(begins)
        evaluation = eval_sets(settings)
        for eval_set in evaluation:
            self._tell_skipped(f"{settings.eval_flag} {eval_set.name}", len(eval_set.skipped), *eval_set.skipped[:1])
        self._rewards = Rewards(args, make_scorer(settings))
        self._publisher = Publisher(
            client,
            pause_mode=settings.engine.pause_generation_mode,
            health_timeout_s=settings.engine.rollout_health_check_timeout,
            ranks_per_engine=settings.engine.rollout_num_gpus_per_engine if self._backend.uses_gpus else 1,
        )
        self._rollouts = assemble(
            settings, source=self._source, client=client, publisher=self._publisher, encode=encoder.encode,
            scoring=self._rewards, eval_sets=evaluation, tokenizer=tokenizer, steps=self._steps,
            state_of_run=self._state, **more,
        )  # fmt: skip
        if isinstance(self._rollouts.feed, WorkerFeed):
            fully_async_rollout.adopt_feed(self._rollouts.feed, args)
        return f"http://{settings.engine.sglang_router_ip}:{port}"

    async def run(self) -> None:
        """Generates until `close`. Raises what stopped it otherwise."""
        try:
            await self._rollouts.run()
        finally:
            await asyncio.to_thread(self._state.ledger.store.close)
            await self._rewards.close()
            await self._gateway.close()
            close = getattr(self._source, "close", None)
            if close is not None:
                await asyncio.to_thread(close)

    async def close(self) -> None:
        self._rollouts.close()

    # ---- the ring's calls

    async def take_batch(self, step: int) -> tuple[Any, dict[str, float]]:
        """The batch's columns (fetched by the trainer ranks alone) and the metrics of its samples."""
        settings, now = self._settings, asyncio.get_running_loop().time
        started = now()
        batch = await self._rollouts.take_batch(step)
        waited_s = now() - started
        groups, rewards = batch.groups, None
        if settings.debug.save_debug_rollout_data is not None:
            kept = [group.samples for group in groups]
            await asyncio.to_thread(save_groups, settings.debug.save_debug_rollout_data, step, kept)
        converter = settings.reward.custom_convert_samples_to_train_data_path
        if settings.reward.custom_reward_post_process_path and not converter:
            groups, rewards = await post_process(settings.reward.custom_reward_post_process_path, self._args, groups)
        metrics = rollout_metrics(
            [g.samples for g in groups],
            version=batch.version,
            reward_key=settings.reward.reward_key,
            max_response_len=settings.sampling.rollout_max_response_len,
        )
        if settings.run.log_passrate:
            metrics |= passrate_metrics([g.samples for g in groups], reward_key=settings.reward.reward_key)
        if settings.run.log_reward_category:
            metrics |= category_metrics([g.samples for g in batch.groups], settings.run.log_reward_category)
        told = {**batch.metrics, **metrics}
        path = settings.rollout.custom_rollout_log_function_path
        if path:
            more = dict(batch.metrics)
            samples = [sample for g in groups for sample in iter_samples(g.samples)]
            skips = await log_rollout(path, step, self._args, samples, more, waited_s)
            told = {} if skips else {**more, **metrics}
        told |= self._counters()
        if converter:
            return await convert(converter, self._args, groups), told
        log_probs = settings.train.loss_type == "policy_loss"
        return to_train_data(groups, settings.reward.reward_key, rewards, log_probs=log_probs), told

    def _counters(self) -> dict[str, float]:
        """Depths as they are now; what was lost since the last batch."""
        status = self._rollouts.status()
        skipped, first = skipped_rows(self._source)
        if not self._lost[SKIPPED]:
            self._tell_skipped("--prompt-data", skipped, first)
        lost = Counter(
            {
                "rollout/wasted_tokens": status["wasted_tokens"],
                "rollout/masked_tokens": status["masked_tokens"],
                "rollout/reward_timeouts": self._rewards.scorer.statistics().timed_out,
                SKIPPED: skipped,
            }
        )
        lost.update({given_up_metric(reason): groups for reason, groups in status["given_up"].items()})
        since = {name: float(count - self._lost[name]) for name, count in lost.items()}
        self._lost = lost
        bias = {metric: v for name, metric in BIASES.items() if (v := status[name]) is not None}
        return since | bias | {
            "perf/engine_idle_ratio": self._rollouts.engine_idle(),
            "rollout/fully_async/queue_size": status.get("buffer_groups", 0),
            "rollout/outstanding_groups": status["outstanding_groups"],
        }  # fmt: skip

    def _tell_skipped(self, flag: str, rows: int, first: str = "") -> None:
        """One event for the rows of ``flag`` that are too long; the metric counts those that follow."""
        if rows:
            self._events.append({"kind": "prompts_too_long", "flag": flag, "rows": rows, "first": first})

    def _tell_lineage(self, begins: StartingPoint) -> None:
        back = self._state.recovered
        if back.next_id:
            self._events.append(
                {"kind": "resumed", "lineage": back.lineage, "after_step": begins.step, "version": begins.version,
                 "groups_kept": len(back.kept), "groups_issued_again": len(back.again), "not_kept": back.not_kept,
                 "lost_tokens": back.lost_tokens}
            )  # fmt: skip

    async def commit(self) -> int:
        return await self._rollouts.commit()

    async def publish(self, weights: Weights, steps_due: int) -> None:
        await self._rollouts.publish(weights, steps_due)

    async def busy_weights(self) -> frozenset[str]:
        return self._rollouts.busy_weights()

    async def evaluate(self, step: int) -> dict[str, float]:
        output = await self._rollouts.evaluate(step)
        more = dict(output.metrics or {})
        path = self._settings.eval.custom_eval_rollout_log_function_path
        if path and await log_evaluation(path, step, self._args, output.data, more):
            return {}
        for name, data in output.data.items():
            more |= eval_metrics(name, eval_groups(data), reward_key=self._settings.eval_reward_key)
        return more

    async def save(self, step: int, folder: str) -> None:
        """The data cursor and the ledger."""
        await self._state.save(step, Path(folder), self._rollouts.open_prompts())

    async def covered(self, step: int) -> None:
        """The checkpoint after ``step`` is complete."""
        await self._state.covered(step)

    # ---- engines come and go

    async def engine_up(self, url: str, pid: int, restarts: int) -> None:
        if url not in self._table.engines:
            self._table.add(url)
        self._table.changes.notify()
        self._events.append({"kind": "engine_up", "url": url, "pid": pid, "restarts": restarts})

    async def engine_down(self, url: str, why: str) -> None:
        self._table.set_aside(url, why)
        self._publisher.forget(url)
        self._events.append({"kind": "engine_down", "url": url, "why": why})

    async def status(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What runs and waits now, and the events since the last call."""
        events, self._events = self._events, []
        return self._rollouts.status(), events


class TrainerSide:
    """One rank of the trainer."""

    def __init__(self, settings: Settings, rank: int, world_size: int, total_steps: int) -> None:
        self._settings = settings
        self._rank = rank
        self._world_size = world_size
        self._total_steps = total_steps

    def address(self) -> str:
        """Where the process group meets, on the node of rank 0."""
        host = ray.util.get_node_ip_address()
        return f"tcp://{host}:{free_port(host)}"

    def start(self, address: str, resume_from: str | None, reference: str | None) -> None:
        from miles.train.rank import TrainerRank

        self._trainer = TrainerRank(
            self._settings,
            rank=self._rank,
            world_size=self._world_size,
            init_method=address,
            total_steps=self._total_steps,
            reference=reference,
        )
        if resume_from is not None:
            self._trainer.load(resume_from)

    def train(self, data: Any, step: int) -> dict[str, float]:
        return self._trainer.train(data, step)

    def write_weights(self, version: int, folder: str, busy: frozenset[str], kind: str) -> Weights:
        return self._trainer.write_weights(version, folder, busy, kind)

    def save(self, folder: str, *, optimizer: bool) -> None:
        self._trainer.save(folder, optimizer=optimizer)

    def export_hf(self, folder: str) -> None:
        self._trainer.export_hf(folder)

    def close(self) -> None:
        self._trainer.close()


EngineActor: Any = ray.remote(num_cpus=0)(EngineSide)
RolloutActor: Any = ray.remote(num_cpus=0, max_concurrency=1000)(RolloutSide)
TrainerActor: Any = ray.remote(num_cpus=0)(TrainerSide)
