"""TransformerEngine's switches (`ub_overlap_ag` and its sisters) as a `Schedule`, and what is said of one that cannot act.

    switch                 stage     collective                                     method
    ub_overlap_ag          column    all-gather of x, under the forward product     ring
                           row       all-gather of dY, under dgrad                  ring
    ub_overlap_rs          row       reduce-scatter of y, under the forward product pipeline
    ub_overlap_rs_dgrad    column    reduce-scatter of dX, under dgrad              pipeline
    ub_bulk_dgrad          column    all-gather of x for wgrad, under dgrad         bulk
    ub_bulk_wgrad          column    reduce-scatter of dX, under wgrad              bulk

A switch is an order, as it is there: it cuts products into chunks however few tokens they have. A plan's method is a wish, of which the
engine leaves out what would lose (`cost.py`).

`initialize_ub(ub_cfgs={"qkv_fprop": {"method": "pipeline", "num_splits": 4}})` chooses the method by the name of a stage and its product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ottava.nn.options import OverlapOptions
from ottava.notices import warn_once_on_rank0
from ottava.overlap.schedule import Schedule

SWITCHES = {
    "ub_overlap_ag": "overlap_all_gather",
    "ub_overlap_rs": "overlap_reduce_scatter",
    "ub_overlap_rs_dgrad": "overlap_reduce_scatter_dgrad",
    "ub_bulk_dgrad": "bulk_dgrad",
    "ub_bulk_wgrad": "bulk_wgrad",
}
_MODES = {
    "ub_overlap_ag": ("column", "row"),
    "ub_overlap_rs": ("row",),
    "ub_overlap_rs_dgrad": ("column",),
    "ub_bulk_dgrad": ("column",),
    "ub_bulk_wgrad": ("column",),
}
STAGES, PRODUCTS = ("qkv", "proj", "fc1", "fc2"), ("fprop", "dgrad", "wgrad")
CONFIGURED = tuple(f"{stage}_{product}" for stage in STAGES for product in PRODUCTS)
_METHODS = {"ring_exchange": "ring", "pipeline": "pipeline", "bulk": "bulk"}

_configured: dict[str, dict[str, Any]] = {}


def configure(configs: dict[str, dict[str, Any]]) -> None:
    """What `initialize_ub` is given as `ub_cfgs`: by the name of a product, "method" and "num_splits". Replaces what was there."""
    for name, config in configs.items():
        if name not in CONFIGURED:
            raise ValueError(f"initialize_ub: ub_cfgs has {name!r}; its names are {', '.join(CONFIGURED)}.")
        method = config.get("method")
        if method is not None and method not in _METHODS:
            raise ValueError(
                f"initialize_ub: ub_cfgs[{name!r}] has method {method!r}; it is one of {', '.join(_METHODS)}."
            )
        if method is not None:
            _warn_of_unserved(name, method)
        splits = config.get("num_splits", 1)
        if not isinstance(splits, int) or splits < 1:
            raise ValueError(f"initialize_ub: ub_cfgs[{name!r}] has num_splits {splits!r}; it is a number of pieces.")
    _configured.clear()
    _configured.update(configs)


def schedule_of(options: OverlapOptions, mode: str, name: str, sequence_parallel: bool, size: int) -> Schedule:
    """The schedule of a stage of kind `mode` that TransformerEngine would call `name`."""
    if not sequence_parallel or size == 1:
        return Schedule()
    if options.method is not None:
        return Schedule.of(options.method, options.transport, options.minimum_tokens)
    asked = tuple(s for s, field in SWITCHES.items() if getattr(options, field) and mode in _MODES[s])
    if not asked:
        return Schedule()
    on = dict.fromkeys(asked, True)
    both_ways = on.get("ub_overlap_ag", False) and mode == "row"
    schedule = Schedule(
        gather="ring" if "ub_overlap_ag" in on else "none",
        scatter="pipeline" if "ub_overlap_rs" in on else "none",
        scatter_dgrad="pipeline" if "ub_overlap_rs_dgrad" in on else "bulk" if "ub_bulk_wgrad" in on else "none",
        gather_wgrad="bulk" if "ub_bulk_dgrad" in on or both_ways else "none",
        transport=options.transport,
        minimum_tokens=options.minimum_tokens or 0,
        requested=asked,
    )
    return _as_configured(schedule, mode, name)


def _as_configured(schedule: Schedule, mode: str, name: str) -> Schedule:
    """With the methods that `initialize_ub` was given for the products of stage `name`."""
    gather, scatter = ("fprop", "dgrad") if mode == "column" else ("dgrad", "fprop")
    gathered, scattered = (_configured.get(f"{name}_{product}", {}) for product in (gather, scatter))
    if schedule.gather != "none" and gathered.get("method") in ("ring_exchange", "pipeline"):
        schedule = replace(schedule, gather=_METHODS[gathered["method"]])
    sums_in_pieces = schedule.scatter != "none" or schedule.scatter_dgrad == "pipeline"
    if scattered.get("method") == "ring_exchange" and sums_in_pieces:
        warn_once_on_rank0(
            f"ottava: ub_cfgs[{f'{name}_{scatter}'!r}]: a sum over ranks goes in a pipeline, not in a ring: it has the same bytes."
        )
    splits = {
        product: config["num_splits"]
        for product, config, in_pieces in (
            (gather, gathered, schedule.gather == "pipeline"),
            (scatter, scattered, sums_in_pieces),
        )
        if in_pieces and "num_splits" in config
    }
    if len(set(splits.values())) > 1:
        warn_once_on_rank0(
            f"ottava: ub_cfgs: {name} has one number of pieces for all of its products: {splits[scatter]}."
        )
    return replace(schedule, splits=splits.get(scatter, splits.get(gather, schedule.splits)))


_SERVED = {
    **dict.fromkeys(("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"), ("ring_exchange", "pipeline")),
    **dict.fromkeys(("proj_fprop", "fc2_fprop"), ("pipeline", "ring_exchange")),
    **dict.fromkeys(("qkv_dgrad", "fc1_dgrad"), ("bulk", "pipeline", "ring_exchange")),
    **dict.fromkeys(("qkv_wgrad", "fc1_wgrad"), ("bulk",)),
    **dict.fromkeys(("proj_wgrad", "fc2_wgrad"), ()),
}
"""Methods that each product knows; the switches say which of them is on."""


def _warn_of_unserved(name: str, method: str) -> None:
    served = _SERVED[name]
    if method not in served:
        known = f"it knows {', '.join(served)}" if served else "nothing travels under it"
        warn_once_on_rank0(
            f"ottava: initialize_ub: ub_cfgs[{name!r}] has method {method!r}, which has no effect: {known}."
        )


def warn_of_idle_switches(
    module: str, options: OverlapOptions, modes: Sequence[str | None], sequence_parallel: bool, size: int
) -> None:
    """One warning for every option of a module that cannot act, with the reason."""
    if options.symmetric_all_reduce is not None:
        warn_once_on_rank0(
            f"ottava: {module}: symmetric_ar_type={options.symmetric_all_reduce!r} has no effect: sums over ranks that do not spread "
            "tokens go over the process group."
        )
    if options.method is not None:
        return  # a plan was checked as a whole
    on = [switch for switch, field in SWITCHES.items() if getattr(options, field)]
    if not on:
        return
    if size == 1:
        warn_once_on_rank0(
            f"ottava: {module}: {', '.join(on)} has no effect: one tensor-parallel rank has no communication to hide."
        )
        return
    if not sequence_parallel:
        warn_once_on_rank0(
            f"ottava: {module}: {', '.join(on)} has no effect without sequence_parallel=True: only tokens that are spread over ranks are "
            "gathered before and scattered after a product."
        )
        return
    for switch in on:
        if not set(_MODES[switch]) & set(modes):
            kinds = " and ".join(_MODES[switch])
            warn_once_on_rank0(
                f"ottava: {module}: {switch} has no effect: it acts on {kinds} parallelism, not on {'/'.join(map(str, modes))}."
            )
    if options.overlap_reduce_scatter_dgrad and options.bulk_wgrad and "column" in modes:
        warn_once_on_rank0(
            f"ottava: {module}: ub_bulk_wgrad has no effect beside ub_overlap_rs_dgrad: the sum that it would hide under wgrad travels "
            "under dgrad."
        )
