"""The training loop. `train` sets everything up in every rank; `Loop.run` is what happens then, step by step.

A step: data -> for each microbatch forward, backward -> norm of gradients -> all ranks agree that it is finite -> optimizer ->
metrics. Between steps, when the state is whole: evaluation, a sample, a checkpoint, or the end.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch

from ottava.checkpoint import Loaded, NoUsableCheckpoint
from ottava.distributed.gradients import gradient_sync
from ottava.distributed.waits import comm_wait_hook
from ottava.guard.finding import Finding
from ottava.notices import warn_once
from ottava.overlap import measuring
from ottava.train import exits, run_folder
from ottava.train.clock import Clock, Span
from ottava.train.config import Config
from ottava.train.config_checks import check_data_parallel
from ottava.train.console import say
from ottava.train.data import IGNORED, Batch, Prefetch
from ottava.train.evaluate import evaluate
from ottava.train.exits import NonFinite, NotSaved
from ottava.train.fp8_health import Fp8Health
from ottava.train.gates import judge
from ottava.train.health import Health
from ottava.train.inputs import open_data, open_tokenizer
from ottava.train.lasting import Lasting
from ottava.train.microbatch_graph import microbatch_graphs
from ottava.train.model import DistributedModel
from ottava.train.numbers import NumberGuard
from ottava.train.optimizer import Numbers, can_step_if, clip_gradients, make_optimizer, set_lr, step_if
from ottava.train.recorder import Recorder, Report
from ottava.train.sample import generate
from ottava.train.saves import Saves
from ottava.train.schedule import lr_fraction
from ottava.train.signals import RankSignals
from ottava.train.state import RunState
from ottava.train.step import Step
from ottava.train.summary import as_text, summarize, table
from ottava.train.tokenize import Tokenizer, standard_library
from ottava.train.watchdog import Watchdog
from ottava.train.world import World


def train(
    config: Config,
    world: World,
    stop: RankSignals | None = None,
    watchdog: Watchdog | None = None,
    report: Report | None = None,
) -> int:
    """Trains until the end, a signal or a failure; returns the exit code. Every rank calls it.

    stop, watchdog: what handles signals and watches already. report: is told of every step, in every rank.

    >>> with World(place, timeout=600.0) as world:
    ...     sys.exit(train(config, world))
    """
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    with ExitStack() as lasting:
        kept = Lasting(config, lasting, stop, watchdog)
        kept.report = report
        while True:
            with ExitStack() as resources:
                try:
                    return _train(config, world, resources, kept)
                except Exception as error:
                    if not world.survives(error):
                        raise
                    forget_frames(error)
                with suppress(Exception):  # what was under way has failed with the rank
                    resources.close()
            for _ in range(2):  # the model; then the FP8 copies of its weights, which are cycles that parameters held
                gc.collect()
            world.meet_again(kept.watchdog.restart())
            kept.watchdog.met(world.seats)


def forget_frames(error: BaseException | None) -> None:
    """An exception, and those that it came from, hold what their functions held: the model."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _train(config: Config, world: World, resources: ExitStack, kept: Lasting) -> int:
    """From the newest state to the end, if no rank dies."""
    loop = Loop(_on_ranks(config, world), world, resources, kept=kept)
    try:
        code = loop.run()
    except (NonFinite, NotSaved) as error:
        loop.say(f"ottava train: {error}")
        code = exits.NON_FINITE if isinstance(error, NonFinite) else exits.NOT_SAVED
    return loop.finish(code)


def _on_ranks(config: Config, world: World) -> Config:
    """The configuration on the ranks that there are, some of which may have died."""
    plan = config.plan(world.device.type).resolve(world.size)
    ranks = plan.dp_replicate * plan.dp_shard
    found = config.on_ranks(ranks)
    check_data_parallel(found, ranks)
    asked, fitting = config.train.micro_batch, found.train.micro_batch
    if fitting != asked and world.leads:
        say(f"train.micro_batch is {fitting} here, not {asked}: {ranks} ranks have {fitting} sequences of a step each.")
    return found


class Loop:
    """One run. Resources that must be closed go to `resources`."""

    def __init__(
        self,
        config: Config,
        world: World,
        resources: ExitStack,
        kept: Lasting | None = None,
    ) -> None:
        self.config, self.world = config, world
        kept = self.kept = kept or Lasting(config, resources, ranks=(world.rank, world.size))
        self.stop, self.watchdog, self.copies = kept.stop, kept.watchdog, kept.copies
        world.on_rank0(kept.lock.take)
        self.watchdog.connect(world.store)
        if not config.data.files:
            world.on_rank0(lambda: standard_library(Path(config.data.cache).expanduser()))  # the others find it then
        kept.data = kept.data or open_data(config)
        self.data, self.validation = kept.data
        if config.train.sample_tokens and kept.tokenizer is None:
            kept.tokenizer = open_tokenizer(config, self.data)
        self.tokenizer = kept.tokenizer
        if (config.model.vocab_size or self.data.vocab_size) < self.data.vocab_size:
            raise ValueError(
                f"model.vocab_size ({config.model.vocab_size}) is below the {self.data.vocab_size} tokens of the data's tokenizer."
            )
        self.model = DistributedModel(config, self.data.vocab_size, world.device)
        self.optimizer = make_optimizer(config, self.model.module, self.model.decaying)
        self.model.renew_copies_after(self.optimizer)
        world.on_rank0(lambda: run_folder.prepare(config, self.data.identity, again=world.generation > 0))
        self.state = RunState(config, self.model, self.optimizer)
        resources.callback(self.state.checkpoints.close)
        self.watchdog.beat(0, "load")
        self._lost = 0  # steps that the run had come to, of which nothing is left
        self.done = self._continue() if world.generation else self._resume()
        world.on_rank0(lambda: run_folder.describe(config, self.data.identity))
        self.clock, self.health = Clock(world.device), Health(config.health)
        self.fp8 = Fp8Health(config, self.model, world)
        self.guard = NumberGuard(config, self.model, self.optimizer, world)
        self.graphs = microbatch_graphs(config, self.model, world)
        self.recorder = Recorder(config, world, self.model, self.done, kept.report)
        resources.callback(self.recorder.close)
        if world.generation:
            self.recorder.note(f"restarted in place: {world.cause}")
        if self._lost:
            text = f"{self._lost} steps were done, and no checkpoint is left: began again at step 0"
            warn_once(f"{config.run_folder}: {text}.")
            self.recorder.note(text)
        self.saves = Saves(config.checkpoint, self.state, self.recorder)
        self._back_at: int | None = None  # the step that the run was last rolled back to
        self._ahead: Step | None = None  # launched, and not judged yet: see `_steps_ahead`
        self.batches = self._prefetch()
        resources.callback(lambda: self.batches.close())
        self.sample: str | None = None

    # -------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> int:
        """All steps that are left. Returns the exit code."""
        config = self.config.train
        if self.world.sum([float(self.stop.requested)])[0]:
            if self.world.generation and self.done and self.done != self.state.checkpoints.last_saved:
                self._save_and_stop()  # from copies in memory
            return exits.STOPPED  # before the first step there is nothing to save otherwise
        while self.done < config.steps or not (self._settle() and self._save(last=True)):
            self.clock.restart()
            if self.saves.due(self.done) and (not self._settle() or (self.health.trusted and not self._save())):
                continue  # rolled back
            found = self._step()
            if found is not None and found.stop:
                self._settle()
                self._save_and_stop()
                return exits.STOPPED
        return exits.DONE

    def _step(self) -> Step | None:
        """Step number `done`, from 0. None if the run went back to a checkpoint instead."""
        step = self.done
        lr = self.config.optimizer.lr * lr_fraction(self.config.schedule, step, self.config.train.steps)
        set_lr(self.optimizer, lr)
        waited, looks = comm_wait_hook(lambda kind: self.clock("communication", kind)), self.recorder.watch.look(step)
        with self.fp8.sample_operands(step), waited, looks, measuring(waits=False) as meter:
            found = self._backward(step)
        found.lr = lr
        if found.clipped is None:  # the GPU goes on with this one while the host learns of the one before
            fine = self._settle()
            self._ahead = found if fine else None
            fine = fine and (not found.wrong or self._settle())
        else:
            fine = self._judge(found)
        if not fine:
            return None
        self.optimizer.zero_grad()
        self.done = step + 1
        self.guard.seal(self.done)
        found.span = self.clock.stop()
        found.span.tp_bytes = meter.all_bytes_sent
        found.validation = self._look_at_the_model()
        if found.clipped is not None:
            self._keep(found)
            self._copy(found.span)
        return found

    def _settle(self) -> bool:
        """Judges the step that was launched and not waited for, if there is one. False: the run went back to a checkpoint."""
        found, self._ahead = self._ahead, None
        if found is None:
            return True
        fine = self._judge(found)
        if fine:
            self._keep(found)
        return fine

    def _judge(self, found: Step) -> bool:
        """Updates the weights by a finite step, if that was not done on the device. False: the run went back to a checkpoint."""
        if found.wrong:
            self._distrust(found.number, found.wrong)
            return False
        verdict = self.health.judge(found.number, found.loss, found.grad_norm, found.bad)
        if verdict != "fine" and not self._explain(found, verdict):
            return False
        if verdict == "fine" and found.clipped is not None:
            with self.clock("optimizer"):
                self.watchdog.beat(found.number - 1, "optimizer")
                self.optimizer.step(**found.clipped)
        return True

    def _explain(self, found: Step, verdict: str) -> bool:
        """Names what made a step bad. False: the run went back to a checkpoint."""
        own_loss, _, _, *counts = found.numbers.read()
        wrong = self.guard.investigate(found.number - 1, own_loss, counts, found.again)
        if any(finding.state for finding in wrong):
            self._distrust(found.number, wrong)
            return False
        found.event = self._tell_bad_step(found, wrong)
        self.model.forget_infinite_amax()
        if verdict == "roll back":
            self._roll_back(found.number, f"not finite{_named(wrong)}")
        return verdict != "roll back"

    def _keep(self, found: Step) -> None:
        """For its line of metrics."""
        loss, grad_norm, event = found.loss, found.grad_norm, found.event
        if event is None and self.health.spike(loss):
            event = "loss spike"
        assert found.span is not None
        self.recorder.keep(found.number, loss, grad_norm, found.lr, found.span, found.validation, event)

    def _backward(self, step: int) -> Step:
        """Gradients of the global batch of `step`, clipped, or to be clipped by the optimizer; or the whole step: `_steps_ahead`."""
        config, model = self.config.train, self.model
        self.watchdog.beat(step, "data")
        with self.clock("data"):
            batch = next(self.batches)
            # Data-parallel ranks average gradients; the mean wanted is that over the tokens of the global batch.
            tokens = self._count(batch)
            batch = batch.to(self.world.device)
        model.seed_step(step)
        parts = batch.split(config.micro_batch)
        weight = model.meshes.dp_size / tokens
        self.guard.begin()
        total = self._accumulate(step, parts, weight)
        self.recorder.write()  # a step before; a GPU has its hands full now
        self.fp8.write()
        wrong = self.guard.replay(step, lambda backward: self._accumulate(step, parts, weight, 1, backward))
        with self.clock("optimizer"):
            norm, clipped = clip_gradients(model.module, self.optimizer, self.config.optimizer.clip)
            found = Step(step + 1, Numbers(total, norm, self.guard.reading()), tokens=tokens, wrong=wrong)
            found.again = partial(self._accumulate, step, parts, weight, again=len(parts))
            if self._steps_ahead and not wrong:
                step_if(self.guard.sound(found.numbers.together), self.optimizer, clipped)
        self.watchdog.beat(step, "agreement")
        self.batches.take_early()  # the thread that makes batches works while this one waits
        if self._steps_ahead:
            found.stop = self.stop.requested
            return found
        loss, grad_norm, *counts = found.numbers.read()
        loss_sum, stops, found.all_bad = self.world.sum([loss, float(self.stop.requested), sum(counts)])
        replicas = self.world.size / model.meshes.dp_size  # tp ranks have the same tokens, each a loss of them
        found.known = loss_sum / replicas / tokens, grad_norm
        found.clipped, found.stop = clipped, stops > 0
        return found

    def _accumulate(
        self, step: int, parts: list[Batch], weight: float, again: int = 0, backward: bool = True
    ) -> torch.Tensor:
        """Gradients of all microbatches; returns the summed loss, float64. again: of the first ones, as they were computed before.

        backward: without, the loss alone; a graph has both.
        """
        total: torch.Tensor | None = None
        if again:
            self.optimizer.zero_grad()
            self.model.seed_step(step)
        if self.graphs is not None:
            self.graphs.begin(parts, weight, eager=bool(again) or self.fp8.looks_at(step) or self.guard.due(step))
        last = (again or len(parts)) - 1
        for i, part in enumerate(parts[: last + 1]):
            first = None if len(parts) == 1 or self.config.train.compile else i == 0
            with (
                # A single microbatch is the last one: nothing was ever turned off.
                nullcontext()
                if len(parts) == 1
                else gradient_sync(self.model.module, i == last, self.model.keep_gathered),
                nullcontext() if again else self.guard.recording(step, i),
            ):
                loss = self._microbatch(step, part, weight, first, backward)
                total = loss.to(torch.float64, copy=True) if total is None else total.add_(loss)
        assert total is not None
        return total

    @property
    def _steps_ahead(self) -> bool:
        """Whether the optimizer steps before the host knows that it may: the device knows. The host then looks at a step when the next
        one is launched, so that a GPU never waits for it; ranks would have to agree first."""
        return self.world.size == 1 and can_step_if(self.optimizer)

    def _microbatch(
        self, step: int, part: Batch, weight: float, first: bool | None, backward: bool = True
    ) -> torch.Tensor:
        """Adds `weight` times the gradients of the summed loss, which is returned. backward: without, the loss alone."""
        config, model = self.config.train, self.model
        self.watchdog.beat(step, "forward")
        if self.graphs is not None:
            with self.clock("backward"):  # and forward: one launch
                return self.graphs.run(part, first)
        with self.clock("forward"), model.precision():
            loss = model.module(
                part.tokens,
                part.targets,
                part.packed(),
                is_first_microbatch=first,
                reduction="sum",
                z_loss=config.z_loss,
                max_logits=config.max_logits,
            )
        if not backward:
            return loss.detach()
        self.watchdog.beat(step, "backward")
        with self.clock("backward"):
            (loss * weight).backward()
        return loss.detach()

    def _count(self, batch: Batch) -> float:
        """Tokens of the global batch that have a target."""
        if not self.config.data.document_mask:
            return float(self.config.train.global_batch * self.config.data.length)
        mine = float((batch.targets != IGNORED).sum())
        meshes = self.model.meshes
        return max(self.world.sum([mine])[0] * meshes.dp_size / self.world.size, 1.0)

    # ---------------------------------------------------------------------------------------------------- between steps

    def _copy(self, span: Span) -> None:
        """The state, to a neighbour's memory, where that is due. The steps that it contains have their lines first."""
        if self.world.kept and self.health.trusted and self.copies.due(self.done):
            self.watchdog.beat(self.done, "copy")
            self.recorder.write()
            self.copies.make(self.done, self.world, self.model.module, self.optimizer, span.read()[0])

    def _begin_save(self) -> None:
        """The steps that a checkpoint contains have their lines first."""
        self.watchdog.beat(self.done, "checkpoint")
        self.recorder.write()
        self.fp8.write()
        self.world.on_rank0(self.data.check_unchanged)

    def _save(self, last: bool = False) -> bool:
        """A checkpoint. False if the state is not to be trusted, and the run went back to one where it is. last: committed after this."""
        self._begin_save()
        try:
            if wrong := self.guard.holds(self.done):
                self._distrust(self.done, wrong)
                return False
            with self.clock("checkpoint"):
                (self.saves.last if last else self.saves.save)(self.done)
        except NonFinite as error:
            self.say(f"ottava train: {error}")
            self.health.check_rollbacks(self.done, str(error))
            self._roll_back(self.done)
            return False
        return True

    def _save_and_stop(self) -> None:
        """What a signal asks for. A state that cannot be trusted is left: the next start goes on from the checkpoint before."""
        self._begin_save()
        try:
            if not self.health.trusted:
                raise NonFinite(
                    f"Step {self.done} is not saved: it was skipped, because loss or gradients are not finite."
                )
            if wrong := self.guard.holds(self.done):
                self._tell(self.done, "found", wrong)
                raise NonFinite(f"Step {self.done} is not saved: {wrong[0].text}.")
            self.saves.last(self.done)
        except NonFinite as error:
            self.say(f"ottava train: {error} The newest checkpoint is of step {self.state.checkpoints.last_saved}.")

    def _due(self, every: int) -> bool:
        return every > 0 and self.done > 0 and self.done % every == 0

    def _look_at_the_model(self) -> float | None:
        """Validation loss and a sample, where they are due."""
        config, last = self.config.train, self.done == self.config.train.steps
        validation = None
        if self.validation is not None and (last or self._due(config.evaluate_every)):
            beat = partial(self.watchdog.beat, self.done, "evaluation")
            validation = evaluate(self.model, self.validation, self.config, self.world, beat)
        if self.tokenizer is not None and (last or self._due(config.sample_every)):
            self.watchdog.beat(self.done, "sample")
            self.sample = self._sample(self.tokenizer)
            self.say(f"--- sample after step {self.done}\n{self.sample}\n---")
        return validation

    def _sample(self, tokenizer: Tokenizer) -> str:
        config = self.config.train
        prompt = [int(t) for t in next(iter(tokenizer.encode([config.sample_prompt])))]
        with self.model.eval_scope():
            tokens = generate(
                self.model.module,
                prompt or [tokenizer.end_token],
                config.sample_tokens,
                self.config.data.length,
                seed=config.seed,
                end_token=tokenizer.end_token,
                device=self.world.device,
                multiple=self.config.parallel.tp,
                beat=partial(self.watchdog.beat, self.done, "sample"),
            )
        return config.sample_prompt + tokenizer.decode(tokens)

    def _distrust(self, failed: int, wrong: list[Finding]) -> None:
        """The state is wrong, or was computed wrong: it goes back to the last checkpoint. failed: the step, from 1."""
        self._tell(failed, "found", wrong)
        self.health.check_rollbacks(failed, f"Step {failed}: {wrong[0].text}, after")
        kinds = {"non-finite": "not finite", "implausible": "not plausible"}
        intact = not any(finding.state for finding in wrong)
        self._roll_back(failed, f"{kinds.get(wrong[0].kind, 'silent corruption')}{_named(wrong)}", intact)

    def _tell(self, step: int, what: str, wrong: list[Finding]) -> None:
        text = f"{wrong[0].text[0].upper()}{wrong[0].text[1:]}."
        if len(wrong) > 1:
            text += f" {len(wrong) - 1} more tensors are wrong."
        self.guard.events.tell(step, what, text, wrong)
        self.say(f"ottava train: {text}")

    def _tell_bad_step(self, found: Step, wrong: list[Finding]) -> str:
        """Names what made it bad; returns what the line of metrics says of it."""
        text = f"Step {found.number} has {found.trouble}"
        text += f": {wrong[0].text}." if wrong else "; run again, every tensor is finite: transient."
        self.guard.events.tell(
            found.number, "skipped", text, wrong, loss=found.loss, grad_norm=found.grad_norm, bad=found.bad
        )
        if wrong:
            self.say(f"ottava train: {text}")
        return f"skipped: {found.trouble.removeprefix('a ')}{_named(wrong)}"

    def _roll_back(self, failed: int, why: str = "not finite", intact: bool = False) -> None:
        """To the last checkpoint; the steps after it are done again, on the same data.

        intact: the state is good as it is, if there is no checkpoint.
        """
        self.batches.close()
        self._ahead, loaded = None, None
        if (
            self.health.rollbacks and self._back_at is not None
        ):  # twice from the same place: what lies there is not good
            self.state.distrust(self._back_at)
            loaded = self.state.load(below=self._back_at)
        loaded = loaded or self.state.load()
        if loaded is None and not intact:
            raise NonFinite(f"Step {failed} ({why}) cannot be trusted, and there is no checkpoint to go back to.")
        self.health.rolled_back()
        self.optimizer.zero_grad()
        self.guard.forget()
        if self.graphs is not None:
            self.graphs.forget()
        if loaded is not None:
            self.done = self._back_at = loaded.step
            self.copies.forget()
        self.batches = self._prefetch()
        self.recorder.rewind(self.done, f"rolled back from step {failed}: {why}")
        text = (
            f"Step {failed}: {why}: back to "
            + ("the checkpoint of " if loaded else "the end of ")
            + f"step {self.done}."
        )
        self.guard.events.tell(failed, "rolled back", text, to=self.done)
        self.say(text)

    # ------------------------------------------------------------------------------------------------ beginning and end

    def _continue(self) -> int:
        """After a restart in place: steps that are done, from the newest state: the copies in memory, or a checkpoint that is newer."""
        step = self.copies.newest(self.world)
        if step is None:
            self.copies.forget()
            return self._resume(self.state.load())
        # A later checkpoint than the run has come to is one that it went back behind.
        folder = self.config.run_folder
        come_to = self.world.share(run_folder.last_step(folder) if self.world.leads else None)
        with suppress(NoUsableCheckpoint):  # a damaged one
            if loaded := self.state.load(above=step, below=come_to + 1):
                self.copies.forget()
                return self._resume(loaded)
        self.copies.restore(step, self.world, self.model.module, self.optimizer)
        self.say(f"Going on from the copies in memory: {step} of {self.config.train.steps} steps are done.")
        return step

    def _resume(self, loaded: Loaded | None = None) -> int:
        """Steps that are done already. loaded: what was restored."""
        loaded = loaded or self.state.begin()
        if loaded is None:
            self._lost = self.world.on_rank0(lambda: run_folder.last_step(self.config.run_folder)) or 0
            self._say_what_begins()
            return 0
        for rejected in loaded.rejected:
            self.say(f"{rejected.path} cannot be used: {rejected.reason}")
        steps = self.config.train.steps
        self.say(f"Resuming from {loaded.path}: {loaded.step} of {steps} steps are done.")
        if loaded.step >= steps:
            self.say(
                f"Nothing is left to do. Go on with --train.steps {2 * steps}, or start anew with --train.run FOLDER."
            )
        return loaded.step

    def _say_what_begins(self) -> None:
        config, world = self.config, self.world
        self.say(
            f"Training a {config.model.architecture} of {self.model.parameters:,} parameters on {world.size} x {world.device.type}, "
            f"{config.train.steps:,} steps of {config.train.global_batch * config.data.length:,} tokens; products: "
            f"{config.precision.recipe}; run: {config.run_folder}"
        )

    def _prefetch(self) -> Prefetch[Batch]:
        part = (self.model.meshes.dp_rank, self.model.meshes.dp_size)
        size, pin = self.config.train.global_batch, self.world.device.type == "cuda"

        def make(step: int) -> Batch:
            batch = self.data.batch(step, size, part)
            return batch.pin_memory() if pin else batch

        return Prefetch(make, start=self.done, depth=self.config.data.prefetch)

    def finish(self, code: int) -> int:
        """Writes and prints the summary; judges the gates. Returns the exit code."""
        failed = False
        self.watchdog.beat(self.done, "end")
        self.recorder.write()
        self.fp8.write()
        if self.world.leads:
            lines = self.recorder.lines()
            gates = judge(self.config.gate, lines) if code == exits.DONE else []
            failed = not all(gate.passed for gate in gates)
            outcome = exits.OUTCOMES[exits.GATE_FAILED if failed else code]
            if code == exits.STOPPED:
                outcome = f"stopped by {self.stop.name}"
            summary = summarize(self.config, outcome, lines, gates, sample=self.sample)
            try:
                run_folder.write_summary(self.config.run_folder, summary)
            except OSError as error:  # a full disk: it is printed all the same
                self.say(f"ottava train: summary.json cannot be written: {error.strerror}.")
            self.say("\n" + as_text(self.config, summary))
            if gates:
                self.say("\nGates\n" + table([gate.row() for gate in gates]))
        return exits.GATE_FAILED if self.world.share(failed) else code

    def say(self, text: str) -> None:
        """Prints, once."""
        if self.world.leads:
            say(text)


def _named(wrong: list[Finding]) -> str:
    """What follows a kind of trouble in a line of metrics."""
    return f": {wrong[0].short}" if wrong else ""
