"""Frozen, validated settings; nothing here touches a process group or a device."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_autoparallel.errors import ConfigError, did_you_mean

MESH_AXES = ("dp_replicate", "dp_shard", "tp")
RESERVED_AXES = {"cp": "context parallelism is not built yet: shard the batch over dp_shard instead"}
AUTO = "auto"
PLANS = ("ddp", "fsdp", "hsdp", AUTO)
CHECKPOINT_POLICIES = ("none", "full", "selective")
CAPTURE_MODES = ("auto", "step", "forward")
DECOMPOSE_WHEN = ("auto", "never", "always")
DECOMPOSE_ORDERS = ("swizzle", "cyclic", "broadcast")
EDGES = ("outputs", "inputs")  # of modules, whose values rules may pin
STORED = "stored"
_PLACEMENT = re.compile(r"R|S\(-?\d+\)")


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """The axes of the device mesh and their sizes, outermost first; one size may be -1.

    Raises:
        ConfigError: an unknown or reserved axis, a size that is neither positive nor -1, or two sizes of -1.
    """

    axes: tuple[tuple[str, int], ...] = (("dp_shard", -1),)

    def __post_init__(self) -> None:
        if not self.axes:
            raise ConfigError("mesh {} has no axis: name at least one, for example {dp_shard: -1}")
        for name, size in self.axes:
            _check_axis(name, size)
        if sum(size == -1 for _, size in self.axes) > 1:
            raise ConfigError(f"mesh {self} has more than one -1: only one axis can be inferred from the world size")

    @classmethod
    def from_mapping(cls, mesh: Mapping[str, int] | MeshSpec | str) -> MeshSpec:
        """The spec of ``{"dp_replicate": 2, "dp_shard": -1}``, in the order written.

        Raises:
            ConfigError: no mapping; only planning looks for a mesh.
        """
        if isinstance(mesh, str):
            raise ConfigError(
                f"mesh {mesh!r} names no axes: run `lightning-autoparallel plan --strategy.mesh auto --world-size N`, "
                "which ranks the meshes of N ranks, and give the one it puts first, as {dp_shard: -1, tp: 8}"
            )
        if isinstance(mesh, MeshSpec):
            return mesh
        return cls(axes=tuple(mesh.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes, outermost first; -1 while unresolved."""
        return tuple(size for _, size in self.axes)

    def resolve(self, world_size: int) -> MeshSpec:
        """The same mesh with -1 replaced, so that the sizes multiply to ``world_size`` processes.

        Raises:
            ConfigError: the sizes cannot multiply to ``world_size``.
        """
        known = math.prod(size for size in self.sizes if size != -1)
        if -1 not in self.sizes:
            if known != world_size:
                raise ConfigError(
                    f"mesh {self} needs {known} processes, Trainer started {world_size}: "
                    f"set devices={known} or {self._last_dp_axis()}=-1"
                )
            return self
        if world_size % known:
            raise ConfigError(
                f"mesh {self} cannot be filled: {world_size} processes do not divide by {known}; "
                f"start a multiple of {known} processes or change the sizes"
            )
        return MeshSpec(axes=tuple((name, world_size // known if size == -1 else size) for name, size in self.axes))

    def batch_shard(self, rank: int) -> tuple[int, int]:
        """Which batch shard process ``rank`` of a resolved mesh holds, and how many there are."""
        index, shards, processes = 0, 1, math.prod(self.sizes)
        for name, size in self.axes:
            processes //= size
            if name.startswith("dp_"):
                index, shards = index * size + rank // processes % size, shards * size
        return index, shards

    def _last_dp_axis(self) -> str:
        data_parallel = [name for name in self.names if name.startswith("dp_")]
        return data_parallel[-1] if data_parallel else self.names[0]

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {size}" for name, size in self.axes) + "}"


def _check_axis(name: str, size: int) -> None:
    if name in RESERVED_AXES:
        raise ConfigError(f"mesh axis '{name}' is reserved: {RESERVED_AXES[name]}")
    if name not in MESH_AXES:
        hint = did_you_mean(name, MESH_AXES, opening="did you mean") or f"axes are {', '.join(MESH_AXES)}"
        raise ConfigError(f"unknown mesh axis '{name}': {hint}")
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
        raise ConfigError(
            f"mesh axis '{name}' has size {size!r}: give a positive number of processes, or -1 for one axis"
        )


@dataclass(frozen=True, kw_only=True)
class PlanRule:
    """One rule on top of a base plan: parameters, or values at a module's edge, pinned on the axes it names.

    ``kind`` is ``"parameter"`` (``pattern`` is a glob over parameter names: what steps compute with), ``"stored"`` (the
    same: where parameters lie between steps), ``"outputs"`` or ``"inputs"`` (over module paths). ``placements`` holds
    pairs of axis and placement, as written: ``"R"`` or ``"S(dim)"``. ``order`` says which axis cuts first where several
    shard one dim.
    """

    key: str
    kind: str
    pattern: str
    placements: tuple[tuple[str, str], ...]
    order: tuple[str, ...] = ()

    @property
    def is_edge(self) -> bool:
        """Whether it pins values at the edge of modules."""
        return self.kind in EDGES


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """A named plan and the rules on top of it; ``file`` is a plan file that holds the placements themselves.

    Its plan ``recomputes`` what that policy of activation checkpointing says, if it says any; where it was ``found``,
    nobody wrote its rules.

    Raises:
        ConfigError: an unknown base, or a rule that cannot be read.
    """

    base: str = "auto"
    rules: tuple[PlanRule, ...] = ()
    file: str | None = None
    recomputes: str | None = None
    found: bool = False

    def __post_init__(self) -> None:
        check_plan(self.base)

    @classmethod
    def parse(cls, plan: str | Mapping[str, Any] | PlanSpec) -> PlanSpec:
        """A plan as users write it: a name, ``{"base": ..., "rules": {...}}``, the rules alone (base auto), or a file.

        ``"order"`` beside ``"rules"`` holds for every rule that has none of its own.
        """
        if isinstance(plan, PlanSpec):
            return plan
        if isinstance(plan, str):
            return cls._from_file(plan) if plan.endswith(".json") else cls(base=plan)
        if not isinstance(plan, Mapping):
            raise ConfigError(f"plan {plan!r} is neither a name ({_plan_names()}) nor a mapping of rules")
        whole: Mapping[str, Any] = plan if "rules" in plan or "base" in plan else {"rules": plan}
        for key in whole:
            if key not in ("base", "rules", "order"):
                raise ConfigError(f"plan key {key!r} is unknown: write {{base: ..., rules: {{...}}, order: [...]}}")
        order = _order(whole.get("order") or (), "plan")
        rules = tuple(_rule(str(key), value, order) for key, value in (whole.get("rules") or {}).items())
        return cls(base=str(whole.get("base", "auto")), rules=rules)

    @classmethod
    def _from_file(cls, path: str) -> PlanSpec:
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            parsed = cls.parse({"base": document["base"], "rules": document["rules"]})
            policy, found = document.get("activation_checkpointing"), bool(document.get("found"))
            return replace(parsed, file=path, recomputes=policy, found=found)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"plan file {path} cannot be read: {type(error).__name__}: {error}") from error

    def as_written(self) -> dict[str, Any]:
        """The mapping that ``parse`` reads.

        Rules of one key become one. What is found for a parameter is what rules behind it ask for, so that those need
        not come last.
        """
        rules: dict[str, Any] = {}
        for rule in self.rules:
            own = {**dict(rule.placements), **({"order": list(rule.order)} if rule.order else {})}
            rules[rule.key] = {**rules.get(rule.key, {}), **own}
        return {"base": self.base, "rules": rules}

    @property
    def name(self) -> str:
        """How reports call it."""
        rules = f" with {len(self.rules)} rule{'s' * (len(self.rules) > 1)}" if self.rules else ""
        return f"{self.base}{rules}" if self.file is None else f"{self.base}{rules} of {self.file}"

    def axes(self) -> frozenset[str]:
        """The mesh axes that rules name."""
        return frozenset(axis for rule in self.rules for axis, _ in rule.placements)


def _rule(key: str, value: Any, order: tuple[str, ...]) -> PlanRule:
    kind, _, path = key.partition(":")
    is_other = bool(path) and kind in (*EDGES, STORED)
    if not isinstance(value, Mapping):
        raise ConfigError(f"rule {key!r} is {value!r}: give a mapping from mesh axes to placements, like {{tp: S(0)}}")
    named = {str(axis): text for axis, text in value.items() if axis != "order"}
    for axis in named:
        _check_axis(axis, 1)
        if axis.startswith("dp_") and not (is_other and kind == STORED):
            raise ConfigError(
                f"rule {key!r} names {axis}: on dp_* axes every rank computes with whole parameters; rules may name "
                f"tp, or say where parameters lie between steps: {{'{STORED}:{path or key}': {{{axis}: S(0)}}}}"
            )
    placements = tuple((axis, _placement_text(key, axis, text)) for axis, text in named.items())
    return PlanRule(
        key=key,
        kind=kind if is_other else "parameter",
        pattern=path if is_other else key,
        placements=placements,
        order=_order(value.get("order") or order, f"rule {key!r}"),
    )


def _order(value: Any, owner: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{owner} has order {value!r}: list the mesh axes, the one that cuts first at the start")
    for axis in value:
        _check_axis(str(axis), 1)
    return tuple(value)


def _placement_text(key: str, axis: str, text: Any) -> str:
    if not isinstance(text, str) or not _PLACEMENT.fullmatch(text.replace(" ", "")):
        raise ConfigError(f"rule {key!r} gives {axis} the placement {text!r}: write 'R' or 'S(dim)', like 'S(0)'")
    return text.replace(" ", "")


def _plan_names() -> str:
    return ", ".join(map(repr, PLANS))


def check_plan(plan: str) -> str:
    """The plan's name, if it is one.

    Raises:
        ConfigError: an unknown plan.
    """
    if plan not in PLANS:
        hint = did_you_mean(plan, PLANS)
        raise ConfigError(f"unknown plan {plan!r}: plans are {_plan_names()}, or a mapping of rules{hint}")
    return plan


def check_activation_checkpointing(policy: Any) -> None:
    """Refuse what is neither a policy's name nor a function.

    Raises:
        ConfigError: an unknown name, or a ``layer:N`` without a positive number.
    """
    if callable(policy):
        return
    by_kind = policies_by_kind(policy) if isinstance(policy, str) else ()
    for name in [name for _, name in by_kind] or [policy]:
        if name in CHECKPOINT_POLICIES or (isinstance(name, str) and re.fullmatch(r"layer:[1-9]\d*", name)):
            continue
        if name == AUTO and not by_kind:
            continue
        hint = did_you_mean(name, [*CHECKPOINT_POLICIES, "layer:2"])
        raise ConfigError(
            f"unknown activation_checkpointing {policy!r}: write {', '.join(map(repr, CHECKPOINT_POLICIES))}, "
            "'layer:N' (every Nth block), one of these for each kind of block ('encoder.*=full, decoder.*=none'), "
            f"'auto' (with plan 'auto': the least that fits), or give a function of a node{hint}"
        )


def policies_by_kind(policy: str) -> tuple[tuple[str, str], ...]:
    """``"encoder.*=full, decoder.*=none"``: pairs of a glob over blocks and a policy; none for one of all blocks."""
    if "=" not in policy:
        return ()
    entries = [entry.partition("=") for entry in policy.split(",")]
    return tuple((pattern.strip(), name.strip()) for pattern, _, name in entries)


@dataclass(frozen=True, kw_only=True)
class DecomposeSpec:
    """When collectives beside matrix products are sent part by part, in which order, how many parts at a time.

    ``when`` is ``"auto"`` (where the cost model predicts a gain, and not over gloo), ``"never"`` or ``"always"``.
    ``order`` is ``"swizzle"`` (every rank sends its part straight to where it is needed), ``"cyclic"`` (neighbours pass
    parts on) or ``"broadcast"`` (one rank after the other sends its part to all). ``depth`` transfers are in flight.

    Raises:
        ConfigError: an unknown word, or a depth that the order does not allow.
    """

    when: str = "auto"
    order: str = "swizzle"
    depth: int = 1

    def __post_init__(self) -> None:
        _check_word("decompose_matmuls", self.when, DECOMPOSE_WHEN)
        _check_word("decompose_matmuls order", self.order, DECOMPOSE_ORDERS)
        if isinstance(self.depth, bool) or not isinstance(self.depth, int) or self.depth < 1:
            raise ConfigError(f"decompose_matmuls depth {self.depth!r}: give a number of transfers, 1 or more")
        if self.order == "cyclic" and self.depth > 1:
            raise ConfigError(
                f"decompose_matmuls order 'cyclic' with depth {self.depth}: a neighbour passes on what it has "
                "received, so that one transfer at a time is all there can be; set depth 1, or order 'swizzle'"
            )

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | DecomposeSpec) -> DecomposeSpec:
        """The spec of ``"always"``, or of ``{"when": "always", "order": "cyclic", "depth": 1}``.

        Raises:
            ConfigError: what is given is neither, or has an unknown key.
        """
        if isinstance(value, DecomposeSpec):
            return value
        if not isinstance(value, Mapping):
            return cls(when=value)
        for key in value:
            _check_word("key of decompose_matmuls", key, ("when", "order", "depth"))
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """What is captured: ``"step"`` the whole step, ``"forward"`` the modules that it calls, ``"auto"`` what can be.

    ``modules`` are the paths of those that ``"forward"`` captures; None stands for all that are called.

    Raises:
        ConfigError: an unknown word, or modules that are no list of names.
    """

    mode: str = "auto"
    modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_word("capture", self.mode, CAPTURE_MODES)

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | CaptureSpec) -> CaptureSpec:
        """The spec of ``"forward"``, or of ``{"forward": ["net", "head"]}``.

        Raises:
            ConfigError: what is given is neither.
        """
        if isinstance(value, CaptureSpec):
            return value
        if not isinstance(value, Mapping):
            return cls(mode=value)
        names = value.get("forward")
        if set(value) != {"forward"} or isinstance(names, str) or not isinstance(names, Sequence):
            raise ConfigError(f"capture {value!r}: write {{'forward': [...]}} with the paths of modules to capture")
        return cls(mode="forward", modules=tuple(map(str, names)))


def _check_word(what: str, word: Any, allowed: Sequence[str]) -> None:
    if word not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"unknown {what} {word!r}: write {choices}{did_you_mean(word, allowed)}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the pipeline needs to know besides the step, the mesh and the batch.

    ``reshard_after_forward`` is True, False, or ``auto``: as is faster in a plan that is found, else True.
    ``activation_checkpointing`` is a name, ``"layer:N"``, or a function that is given a ``NodeInfo``.
    ``hardware`` is a name or a mapping, as ``cost.hardware_from`` reads them; None, like no ``ranks_per_node``, stands
    for what is usual where the mesh runs. ``memory_budget_gib`` is what plan ``auto`` may use on a rank; with other
    plans it warns where they take more. ``explain`` is a glob over parameters and modules: the report of the training
    step says why they are placed so.
    """

    plan: PlanSpec = PlanSpec()
    reshard_after_forward: bool | str = AUTO
    activation_checkpointing: str | Callable[[Any], Any] = "none"
    compile: bool = True
    max_captures: int = 8
    dump_dir: str | None = None
    disabled_passes: tuple[str, ...] = ()
    bucket_mb: float | None = None
    decompose_matmuls: DecomposeSpec = DecomposeSpec()
    loss_chunks: int | str = AUTO
    reduce_every_micro_batch: bool | str = "auto"
    hardware: str | Mapping[str, Any] | None = None
    ranks_per_node: int | None = None
    memory_budget_gib: float | None = None
    explain: str | None = None

    def __post_init__(self) -> None:
        if self.max_captures < 1:
            raise ConfigError(f"max_captures={self.max_captures}: at least one capture is needed to train")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ConfigError(
                f"bucket_mb={self.bucket_mb}: give a positive number of megabytes, or null for the size that fills the "
                'link; disabled_passes: ["bucket_collectives"] merges nothing'
            )
        chunks = self.loss_chunks
        if chunks != AUTO and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
            raise ConfigError(
                f"loss_chunks={chunks!r}: give a whole number of chunks, 1 for a loss that is computed whole, or 'auto'"
            )
        if self.reduce_every_micro_batch not in (True, False, "auto"):
            raise ConfigError(
                f"reduce_every_micro_batch={self.reduce_every_micro_batch!r}: write true, false, or 'auto', which "
                "reduces once per optimizer step where that costs no memory"
            )
        if self.reshard_after_forward not in (True, False, AUTO):
            raise ConfigError(
                f"reshard_after_forward={self.reshard_after_forward!r}: write true, false, or 'auto', which keeps "
                "parameters gathered until the backward where plan 'auto' has the memory and is faster by it"
            )
        ranks = self.ranks_per_node
        if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
            raise ConfigError(f"ranks_per_node={ranks!r}: give a whole number, of at least one rank on a node")
        check_activation_checkpointing(self.activation_checkpointing)
        if self.plan.recomputes is not None:
            check_activation_checkpointing(self.plan.recomputes)
        elif self.activation_checkpointing == AUTO and self.plan.base != AUTO:
            given = f"plan '{self.plan.name}'"
            if self.plan.file is not None:
                given = f"{self.plan.file}, which names no policy of its plan,"
            raise ConfigError(
                f"activation_checkpointing 'auto' goes with plan 'auto', which knows how much memory there is; with "
                f"{given} write {', '.join(map(repr, CHECKPOINT_POLICIES))} or 'layer:N'"
            )
        budget = self.memory_budget_gib
        if budget is not None and not (isinstance(budget, (int, float)) and budget > 0):
            raise ConfigError(f"memory_budget_gib={budget!r}: give a positive number of GiB that a rank may use")

    def gathers_again(self, plan_keeps: bool = False) -> bool:
        """Whether the backward gathers parameters again, in a plan that ``plan_keeps`` them gathered, or does not."""
        return not plan_keeps if self.reshard_after_forward == AUTO else bool(self.reshard_after_forward)
