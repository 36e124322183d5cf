"""The actors of a run: how each is made of its spec. They end with the run, or with its process."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_apr.core.sample import Prompt
from ray_apr.data.buffer import SampleBuffer
from ray_apr.data.encoding import EncodedPrompts, encode_dataset
from ray_apr.data.kinds import one_table
from ray_apr.data.mapped import mapped_table
from ray_apr.data.parts import PartName, nth_name
from ray_apr.data.prompts import Mix, PromptSource, held_out_prompts
from ray_apr.data.saved_samples import groups_of
from ray_apr.data.store import put
from ray_apr.data.tokenizers import load_tokenizer
from ray_apr.rollout.evaluation import Evaluator
from ray_apr.rollout.scoring import Scorer
from ray_apr.rollout.suites import check_suites, reward_of_suites
from ray_apr.rollout.turns import turn_rules
from ray_apr.rollout.worker import RolloutWorker
from ray_apr.run.journals import header_of, journal_of
from ray_apr.run.preflight import wait_for_cpu
from ray_apr.run.recorder import RunRecorder
from ray_apr.run.resume import poison_rows
from ray_apr.scheduling.intake import SchedulerState
from ray_apr.scheduling.order import with_stops
from ray_apr.serve.builder import end_serve, stop_rollout_servers
from ray_apr.serve.lease import start_lease, wait_for_lease

if TYPE_CHECKING:
    import ray.data

    from ray_apr.config import RolloutConfig
    from ray_apr.data.resumption import Begin
    from ray_apr.run.spec import RunSpec


_ARENAS = "MALLOC_ARENA_MAX"
"""The C library's variable. Each of the 30 threads of a Ray process gets an arena of its own
otherwise, and what one of them allocates and another one frees stays there: such an actor grows for
hours, though it uses no more. One that is set outside wins."""


class Actors:
    """The actors of one run.

    Args:
        spec: What the run is made of.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._run_id = uuid.uuid4().hex[:8]
        self.handles: list[Any] = []
        """In the order in which they were made."""
        self.prompts: EncodedPrompts | None = None
        """Once they are encoded."""
        self.num_replicas = spec.rollout.num_replicas
        """Engines that those which are made from now on know."""
        self._kept: list[Any] = []
        """References to what actors are made with again."""

    def name_of(self, part: str) -> str:
        """Name of an actor, in Ray's tables; no two runs share one."""
        return f"{self._spec.name}-{part}-{self._run_id}"

    def part(self, part: str) -> PartName:
        """Name of an actor, and of those that follow it."""
        return PartName(self.name_of(part), ray.get_runtime_context().namespace)

    def make(
        self,
        cls: type,
        *args: Any,
        part: str,
        scheduling_strategy: Any = None,
        generation: int = 0,
        max_restarts: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Start an actor that ends with this run.

        Args:
            cls: Its class.
            args: What it is made with.
            part: What it is.
            scheduling_strategy: Where it runs.
            generation: How many of its kind have died.
            max_restarts: How often Ray starts it again, and makes the calls again that were under
                way; -1: any number of times.
            kwargs: What it is made with.
        """
        remote = ray.remote(cls).options(
            name=nth_name(self.name_of(part), generation),
            num_cpus=0,
            runtime_env={"env_vars": {_ARENAS: os.environ.get(_ARENAS, "1")}},
            max_concurrency=10_000,
            enable_task_events=False,  # of each call some KB in Ray's control store otherwise
            max_restarts=max_restarts,
            max_task_retries=max_restarts,
            scheduling_strategy=scheduling_strategy,
        )
        handle = remote.remote(*args, **kwargs)
        self.handles.append(handle)
        return handle

    def kill(self) -> None:
        """End them, the last one first: the lease before the recorder, which holds it."""
        for actor in reversed(self.handles):
            ray.kill(actor)

    def take_away(self) -> None:
        """End the servers, all actors whatever becomes of the servers, and Serve if no run is left.

        Waits for: Serve. Unblocked by: its answers, or its limits.
        """
        is_ended = False
        try:
            stop_rollout_servers(self._spec.name)
            is_ended = end_serve(self._spec.name)  # a run of this name waits for the lease's end
        finally:
            self.kill()
            if not is_ended:
                end_serve()  # without a lease: another run may have ended at that moment

    def make_recorder(self, started_at: float) -> Any:
        """Start what writes the run folder, on this node, and the lease of the servers, which it
        holds.

        Waits for: an earlier run of this name. Unblocked by: `wait_for_lease`.

        Raises:
            ResourceError: If another run of this name is on the cluster; no actor is left then.
        """
        wait_for_lease(self._spec.name)
        recorder = self._make_recorder(started_at)
        try:
            self.handles.append(start_lease(self._spec.name, self.name_of("recorder")))
        except BaseException:
            self.kill()
            raise
        return recorder

    def _make_recorder(self, started_at: float) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return self.make(
            RunRecorder,
            str(self._spec.folder),
            started_at,
            self._spec.rollout.prompt_column,
            self._spec.fences[0],
            part="recorder",
            scheduling_strategy=here,
            max_restarts=-1,
        )

    def make_pipeline(
        self, prompts: ray.data.Dataset, begin: Begin, recorder: Any, *, generation: int = 0
    ) -> tuple[Any, Any]:
        """Start the sample buffer and the rollout worker, which feeds it; returns both.

        Args:
            prompts: The dataset; of the first ones only.
            begin: Where they begin.
            recorder: Handle.
            generation: How many of them have died.
        """
        if self.prompts is None:
            known = begin.rollout
            num_prompts = None if known is None else known.num_prompts
            drops = self._spec.prompts.on_too_long == "drop"
            self.prompts = self._encode(
                prompts,
                "prompts",
                num_prompts=num_prompts,
                drops_too_long=drops,
                replay_column=self._spec.rollout.replay_column,
                max_response_tokens=self._spec.rollout.max_response_tokens,
            )
            config = self._spec.prompts
            if config.weights:  # what is wrong with them would be the worker's death
                tables = map(_fetched, self.prompts.tables)
                columns = (table[config.source_column].to_pylist() for table in tables)
                Mix.of([name for names in columns for name in names], config)
        journal = {
            "journal": journal_of(self._spec),
            "epoch": begin.epoch,
            "header": header_of(self._spec) | {"num_prompts": self.prompts.num_prompts},
            "replayed": begin.replayed,
            "generation": generation,
        }
        buffer = self.make_buffer(recorder, **journal)
        return buffer, self._make_worker(self.prompts, begin, buffer, recorder, **journal)

    @property
    def _rollout(self) -> RolloutConfig:
        return dataclasses.replace(self._spec.rollout, num_replicas=self.num_replicas)

    def _tokenizer(self) -> Any:
        return load_tokenizer(self._spec.model, self._spec.rollout.chat_template_kwargs)

    def _encode(self, prompts: ray.data.Dataset, what: str, **expected: Any) -> EncodedPrompts:
        spec = self._spec
        wait_for_cpu(spec.rollout.engine.start_timeout_s)
        return encode_dataset(
            prompts,
            name=f"{spec.name}-{what}",
            model=spec.model,
            column=spec.rollout.prompt_column,
            max_prompt_tokens=spec.max_prompt_tokens(),
            chat_template_kwargs=spec.rollout.chat_template_kwargs,
            **expected,
        )

    def make_buffer(self, recorder: Any, **journal: Any) -> Any:
        """Start the sample buffer.

        Args:
            recorder: Handle.
            journal: What it knows of the journal; without, it notes nothing.
        """
        spec = self._spec
        return self.make(
            SampleBuffer,
            part="buffer",
            **spec.batches,
            config=spec.buffer,
            recorder=recorder,
            save_samples=spec.train.save_samples,
            run=spec.name,
            **journal,
        )

    def _make_worker(
        self,
        prompts: EncodedPrompts,
        begin: Begin,
        buffer: Any,
        recorder: Any,
        **journal: Any,
    ) -> Any:
        spec = self._spec
        rollout, seed, pending = self._rollout, spec.train.seed, begin.prompts_again
        config = spec.prompts
        position = begin.rollout.position if begin.rollout else 0
        reward, environment = spec.reward, spec.environment
        max_inflight = spec.partial_rollout.max_inflight_samples(spec.step_size)
        return self.make(
            RolloutWorker,
            part="rollout",
            rollout=rollout,
            partial_rollout=spec.partial_rollout,
            batch_size=spec.step_size,
            tokenizer=self._tokenizer(),
            make_prompts=lambda: PromptSource(
                [_mapped(prompts)], seed=seed, position=position, pending=pending, config=config
            ),
            make_client=self._client_maker(
                max_inflight=max_inflight,
                weight_sync_timeout_s=spec.train.weight_sync_timeout_s,
                policy_version=begin.of_engines,
            ),
            make_scorer=lambda: Scorer(reward, rollout, environment),
            buffer=buffer,
            recorder=recorder,
            sync_timeout_s=spec.train.weight_sync_timeout_s,
            policy_version=begin.of_engines,
            make_state=_state_maker(begin),
            poison=poison_rows(spec.folder),
            turns=turn_rules(environment, rollout.max_turns),
            group_filter=spec.group_filter,
            run=spec.name,
            before=begin.before,
            **journal,
        )

    def make_evaluator(self, held_out: ray.data.Dataset, recorder: Any) -> Any:
        """Start what evaluates the policy on held-out prompts."""
        spec, config = self._spec, self._spec.evaluation
        assert config is not None  # there are held-out prompts
        tables = self._encode(held_out, "held_out", drops_too_long=None).tables
        has_own = config.suites or config.rewards
        if has_own and (column := config.suite_column):  # of a file it was checked before
            held = one_table(_fetched(tables))
            check_suites(held[column].unique().to_pylist(), config)
        rollout, environment = spec.rollout, spec.environment
        reward = reward_of_suites(spec.reward, config)
        given = self._keep(
            rollout=rollout,
            config=config,
            tokenizer=self._tokenizer(),
            make_prompts=lambda: held_out_prompts(_fetched(tables)),
            make_client=self._client_maker(counts=True),
            make_scorer=lambda: Scorer(reward, rollout, environment),
            recorder=recorder,
            turns=turn_rules(environment, rollout.max_turns),
            run=spec.name,
        )
        return self.make(Evaluator, part="evaluator", max_restarts=-1, **given)

    def _keep(self, **given: Any) -> dict[str, Any]:
        """References to arguments that an actor can be made with again, as long as these actors
        are. Ray itself puts those of more than 100 KB into the object store, and lets go of what is
        there once the actor has started."""
        kept = {name: put(value) for name, value in given.items()}
        self._kept += kept.values()
        return kept

    def _client_maker(self, *, counts: bool = False, **limits: Any) -> Callable[[], Any]:
        """What makes a client of the servers inside an actor; it carries nothing else there.

        Args:
            counts: Whether Serve is asked how many there are: for an actor that Ray starts again,
                which nobody tells.
            limits: Of the client.
        """
        # an actor imports them as it is made: while the engines start, and not once they are there
        from ray_apr.serve.client import ServeRolloutClient
        from ray_apr.serve.handle import num_of_engines

        name, rollout = self._spec.name, self._rollout

        def make_client() -> Any:
            number = (num_of_engines(name) if counts else 0) or rollout.num_replicas
            config = dataclasses.replace(rollout, num_replicas=number)
            return ServeRolloutClient(name, config, **limits)

        return make_client


def _fetched(refs: Any) -> Any:
    """Values of the object store, inside of the actor that wants them.

    Waits for: their way there. Unblocked by: the store, or the error of what it has lost.
    """
    return ray.get(refs)


def _mapped(prompts: EncodedPrompts) -> pa.Table:
    """Prompts in a file of this machine, out of the object store, which may move them to its disk.

    Waits for: their way here, one table after the other. Unblocked by: as `_fetched`.
    """
    return mapped_table(prompts.schema, map(_fetched, prompts.tables))


def _state_maker(begin: Begin) -> Callable[[Callable[[str], Prompt]], SchedulerState] | None:
    """What makes the samples under way inside of the rollout worker; None if there are none."""
    progress = begin.rollout
    if progress is None or begin.samples is None:
        return None
    samples = put(begin.samples)

    def make_state(prompt_of: Callable[[str], Prompt]) -> SchedulerState:
        live, handed_over = groups_of(
            _fetched(samples), lambda name: with_stops(prompt_of(name), progress.num_stops)
        )
        return SchedulerState(
            groups=tuple(live),
            handed_over=tuple(handed_over),
            retries=progress.retries,
            num_long_retries=progress.num_long_retries,
            num_stops=progress.num_stops,
            num_owed=progress.num_owed,
        )

    return make_state
