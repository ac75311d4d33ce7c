"""`smp.explain` and `smp.timeline`: where modules live, and what each rank did in the last step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.core.topology import CommGroup
from smddp.modelparallel.torch.api.memory import estimate_inputs
from smddp.modelparallel.torch.footprint.advice import Proposal, bytes_of, most_needed, proposals
from smddp.modelparallel.torch.job.messenger import Messenger
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.model.runtime import ModelRuntime
from smddp.modelparallel.torch.partition.placement import Decision
from smddp.modelparallel.torch.pipeline.executor import Executor
from smddp.modelparallel.torch.pipeline.timeline import Span

__all__ = ["StepReport", "explain", "timeline"]

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
_NO_TIMELINE = (
    "there is a timeline only after a step in which a microbatch has begun: call smp.timeline "
    "after a step function"
)


def explain(file: str | None = None, memory: int | float | str | None = None) -> str:
    """Returns a table of all partitions, and draws them; says how to fit them into memory.

    Args:
        file: the path of an SVG file to write. It has a column for each partition, with a box for
            each module, whose height is the module's cost. With None, nothing is written.
        memory: what a rank has, in bytes or as a text such as "16 GB" or "15.5 GiB". The text then
            proposes what to change so that each rank needs no more, by the prediction of
            `smp.memory`. Rank 0 of a pipeline knows the shapes of the model's arguments, which the
            prediction needs; so only that rank may ask. It tries, in this order,
            `shard_optimizer_state`, activation checkpointing, `sharded_data_parallel_degree`, twice
            as many partitions and so on, and `offload_activations`, and their combinations, for the
            same number of ranks and the same microbatches. It does not change a degree of sharding
            above 1, but proposes `sdp_reduce_bucket_size` and `sdp_param_persistence_threshold`
            then; and it proposes no further modules if some are marked already.

    Returns:
        The table, and what else reduces the memory of ranks, as text.

    Raises:
        SMPUsageError: there is no model, it is not decided yet where its modules live, or the limit
            cannot be used.
    """
    limit = None if memory is None else bytes_of(memory)
    model = state.current_model()
    if model is None:
        raise SMPUsageError("smp.explain: there is no smp.DistributedModel yet")
    if model.runtime.placement.decision is None:
        raise SMPUsageError(
            "smp.explain: the model is divided only when the first step has begun; make a step "
            "first"
        )
    decision = model.runtime.placement.decision
    if file is not None:
        Path(file).write_text(_partition_svg(decision, state.topology.pp_size))
    texts = [_partition_table(decision, state.topology.pp_size)]
    texts += _memory_choices(model.runtime)
    if limit is not None:
        texts.append(_advice(model.runtime, limit))
    return "\n".join(texts)


def _memory_choices(runtime: ModelRuntime) -> list[str]:
    """Returns a line for each choice that reduces the memory of ranks."""
    cfg, lines = state.cfg, []
    if runtime.sharding is not None:
        divided = sum(entry.numel for entry in runtime.sharding.entries)
        here = sum(parameter.numel() for parameter in runtime.placement.parameters())
        share = 100 * divided / max(here, 1)
        lines.append(
            f"sharded data parallelism: {cfg.sharded_data_parallel_degree} ranks share "
            f"{len(runtime.sharding.entries)} parameters of this partition, {share:.0f} % of its "
            "elements"
        )
    if cfg.shard_optimizer_state:
        count = state.topology.size_of("rdp")
        lines.append(f"optimizer state: divided over {count} replicas")
    regions = runtime.checkpoints.regions()
    if regions:
        names = [runtime.executor.modules.names[region[0]] for region in regions]
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        lines.append(f"activation checkpointing: {len(regions)} regions, which begin with {shown}")
    if cfg.offload_activations:
        what = "arguments of checkpointed modules leave memory" if regions else "nothing to move"
        lines.append(
            f"offload: {what} (activation_loading_horizon {cfg.activation_loading_horizon})"
        )
    if runtime.delayed:
        lines.append("delayed creation: each rank has made only the parameters that live on it")
    return lines


def _advice(runtime: ModelRuntime, limit: int) -> str:
    """Returns what to change so that each rank needs no more memory than a limit."""
    if runtime.executor.rank != 0:
        raise SMPUsageError(
            "smp.explain with a memory limit: call it on rank 0 of the pipeline, which knows the "
            "arguments of the model"
        )
    facts, choices, notes = estimate_inputs(runtime)
    now = most_needed(facts, choices)
    need = f"a rank needs {_size(now)} at most; the limit is {_size(limit)}"
    if now <= limit:
        return "\n".join([f"memory: {need}: it fits", *notes])
    cfg = state.cfg
    default = max(choices.partitions + 2, choices.microbatches if choices.simple else 0)
    least, best = now, ""
    for proposal in proposals(
        facts,
        choices,
        runtime.executor.modules,
        cfg.memory_weight,
        cfg.active_microbatches == default,
    ):
        then = most_needed(facts, proposal.choices)
        if then <= limit:
            lines = [
                f"memory: {need}: it does not fit. With this it needs {_size(then)}:",
                *_changes(proposal),
            ]
            return "\n".join([*lines, *notes])
        if then < least:
            least = then
            best = "\n".join([f"The least is {_size(then)}, with this:", *_changes(proposal)])
    lines = [f"memory: {need}: it does not fit, and no change that smp knows makes it fit."]
    lines += [best] if best else []
    half = "" if cfg.fp16 or cfg.bf16 else ", or fp16 or bf16"
    lines.append(f"Use more ranks, or smaller microbatches (a larger `microbatches`){half}.")
    return "\n".join([*lines, *notes])


def _changes(proposal: Proposal) -> list[str]:
    lines = [f"  {key!r}: {value!r}" for key, value in proposal.keys.items()]
    if proposal.modules:
        path = "" if proposal.modules == "model" else f".{proposal.modules}"
        lines += [
            f"  for block in model.get_module(){path}:",
            "      smp.set_activation_checkpointing(block)",
        ]
    if "sharded_data_parallel_degree" in proposal.keys and state.cfg.sdp_gradient_clipping:
        lines.append(
            f"  # optimizer.step() then clips to the norm {state.cfg.sdp_gradient_clipping}, "
            "unless sdp_gradient_clipping says otherwise."
        )
    return lines


def _size(count: int) -> str:
    """Returns bytes as text, in decimal units."""
    return f"{count / 1e9:.3f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"


def _partition_table(decision: Decision, parts: int) -> str:
    timed = any(cost["seconds"] for cost in decision.costs)
    how = (
        f"{decision.cut_bytes / 1024:.1f} KiB cross borders per microbatch and direction"
        if timed
        else "memory and cost are those of parameters and buffers"
    )
    lines = [
        f"divided by: {decision.method}; {how}",
        f"{'partition':>9}  {'modules':>7}  {'memory':>10}  {'time':>9}  {'cost':>6}  begins with",
    ]
    for part in range(parts):
        rows = decision.rows(part)
        memory = sum(cost["bytes"] for _, cost in rows)
        seconds = sum(cost["seconds"] for _, cost in rows)
        time = f"{seconds * 1e3:>6.2f} ms" if timed else f"{'-':>9}"
        names = ", ".join(name for name, _ in rows[:4]) + (", …" if len(rows) > 4 else "")
        lines.append(
            f"{part:>9}  {len(rows):>7}  {memory / 2**20:>6.2f} MiB  {time}  "
            f"{100 * decision.share(part):>4.0f} %  {names}"
        )
    if nowhere := decision.owners.count(None):
        lines.append(
            f"{'nowhere':>9}  {nowhere:>7}  without parameters or buffers: they run where their "
            "input is"
        )
    return "\n".join(lines)


def _partition_svg(decision: Decision, parts: int) -> str:
    width, gap, line = 220, 16, 13
    scale = 420 / (max(decision.share(part) for part in range(parts)) or 1.0)
    shapes: list[str] = []
    x, bottom = float(gap), 0.0
    for part in range(parts):
        share = 100 * decision.share(part)
        shapes.append(_text(x, 24, f"partition {part}: {share:.0f} % of the cost", line))
        # A label that does not fit into its box stands beside it, below the one before.
        y, beside, room = 40.0, 0.0, 0.0
        for name, costs in decision.rows(part):
            cost = costs["cost"]
            tall = max(cost * scale, 1.0)
            shapes.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width}" height="{tall:.1f}" '
                f'fill="{_COLOURS[part % len(_COLOURS)]}" stroke="white">'
                f"<title>{escape(name)}: {100 * cost:.1f} %</title></rect>"
            )
            middle, right = y + tall / 2, x + width
            if tall >= line:
                shapes.append(_text(x + 6, middle + 4, name, 11, "white"))
            else:
                beside = max(middle, beside + line)
                shapes.append(
                    f'<line x1="{right:.1f}" y1="{middle:.1f}" x2="{right + 12:.1f}" '
                    f'y2="{beside:.1f}" stroke="#bab0ac"/>'
                )
                shapes.append(_text(right + 15, beside + 4, name, 11))
                room = max(room, 15 + 6.5 * len(name))
            y += tall
        x += width + room + gap
        bottom = max(bottom, y, beside)
    return _svg(x, bottom + gap, shapes)


@dataclasses.dataclass
class StepReport:
    """What the ranks of a pipeline did in the last step.

    Attributes:
        spans: for each rank of the pipeline, its pieces of work; see `Span`.
        seconds: from the beginning of the first span to the end of the last one.
        busy: the share of all ranks' time in which they worked, from 0 to 1.
        ideal: what `busy` would be without delays: the slowest rank works without a gap, and the
            others wait only while the pipeline fills and empties.
    """

    spans: list[list[Span]]
    seconds: float
    busy: float
    ideal: float

    def __str__(self) -> str:
        return (
            f"step of {self.seconds * 1e3:.1f} ms on {len(self.spans)} ranks: busy "
            f"{100 * self.busy:.1f} % of the time, without delays {100 * self.ideal:.1f} %"
        )


def timeline(file: str | None = None) -> StepReport:
    """Collects what the ranks of this pipeline did in the last step; all of them have to call it.

    Args:
        file: rank 0 of the pipeline writes it: a picture if the name ends in .svg, else a trace in
            Chrome's JSON format. Replica n > 0 appends its number to the name: `step.svg`,
            `step-1.svg`, and so on. With None, nothing is written.

    Returns:
        The same report on every rank of the pipeline. Its times are those of each host's own clock,
        so ranks on different hosts cannot be compared.

    Raises:
        SMPUsageError: no step has been run yet, or the last one failed before any work.
    """
    executor = state.kept(Executor)
    if executor is None:
        raise SMPUsageError(_NO_TIMELINE)
    mine = executor.timeline.spans
    spans: list[list[Span]] = Messenger(state).allgather(mine, CommGroup.PP_GROUP)
    if not any(spans):
        raise SMPUsageError(_NO_TIMELINE)
    report = _report(spans)
    if file is not None and state.topology.rank_in("pp") == 0:
        path, replica = Path(file), state.topology.rank_in("dp")
        text = _timeline_svg(report) if path.suffix == ".svg" else _chrome(spans)
        if replica > 0:
            path = path.with_stem(f"{path.stem}-{replica}")
        path.write_text(text)
    return report


def _report(spans: list[list[Span]]) -> StepReport:
    everything = [span for rank in spans for span in rank]
    seconds = max(span.end for span in everything) - min(span.start for span in everything)
    work = [sum(span.end - span.start for span in rank) for rank in spans]
    count = len({span.microbatch for span in everything})
    # The work of each rank per microbatch. Without delays a step takes as long as the slowest rank
    # needs for all microbatches, and the others for one: while the pipeline fills and empties.
    each = [rank / count for rank in work]
    bound = count * max(each) + sum(each) - max(each)
    ranks = len(spans)
    return StepReport(spans, seconds, sum(work) / (seconds * ranks), sum(work) / (bound * ranks))


def _timeline_svg(report: StepReport) -> str:
    width, row, left = 1200.0, 34, 70
    begin = min(span.start for rank in report.spans for span in rank)
    scale = width / max(report.seconds, 1e-9)
    shapes = [_text(left, 20, str(report), 13)]
    for rank, spans in enumerate(report.spans):
        y = 36 + rank * row
        shapes.append(_text(6, y + 18, f"rank {rank}", 12))
        for span in spans:
            x, wide = left + (span.start - begin) * scale, (span.end - span.start) * scale
            colour = _COLOURS[span.microbatch % len(_COLOURS)]
            what = f"{'forward' if span.forward else 'backward'} of microbatch {span.microbatch}"
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.5):.1f}" height="{row - 8}" '
                f'fill="{colour}" fill-opacity="{0.95 if span.forward else 0.6}" stroke="white">'
                f"<title>{escape(what)} {escape(span.name)}, "
                f"{(span.end - span.start) * 1e3:.2f} ms</title></rect>"
            )
            if wide > 16:
                letter = "F" if span.forward else "B"
                shapes.append(_text(x + 3, y + 17, f"{letter}{span.microbatch}", 11, "white"))
    return _svg(left + width + 20, 50 + row * len(report.spans), shapes)


def _chrome(spans: Sequence[Sequence[Span]]) -> str:
    events = [
        {
            "name": f"{'F' if span.forward else 'B'}{span.microbatch} {span.name}",
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
        }
        for rank, row in enumerate(spans)
        for span in row
    ]
    return json.dumps({"traceEvents": events})


def _text(x: float, y: float, text: str, size: int, colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-family="sans-serif" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _svg(width: float, height: float, shapes: list[str]) -> str:
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
