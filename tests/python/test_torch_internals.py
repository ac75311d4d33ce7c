"""What smddp takes from torch without documentation: it is all in one file, and torch has it.

When a test here fails with a new release of torch: look the name up in smddp/_torch_internals.py,
which says what needs it and what to do; CONTRIBUTING.md has the steps.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import check_ranks
from torch import nn

from smddp import _torch_internals as internals

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "smddp" / "_torch_internals.py"


@pytest.fixture(autouse=True)
def _transport_between_nodes() -> None:
    """In place of that of all tests: those of names run before anything is compiled."""


# --- nobody else uses private names ---------------------------------------------------------------

# Private names of torch that other files may use, and why.
ALLOWED = {
    "_parameters": "of a module, in all files; noted in the table, and checked by DistributedModel",
    "_buffers": "as _parameters",
    "_modules": "as _parameters",
    "_apply": "DistributedModel overrides it; noted in the table, and checked by DistributedModel",
    "_plugins": "_registration.py, which `import torch` runs, asks for it by getattr",
}
# Private names of others than torch and smddp.
OTHERS = {
    "_getframe": "Python's sys",
    "_current_frames": "Python's sys",
    "_orig_forward": "what scripts for SageMaker's library call",
    "_fp32_grad_accumulation": "a key of the configuration",
    "_match_weights": "a key of the configuration",
    "_make": "Python's named tuples",
    "_fields": "Python's named tuples and ctypes",
    "_fields_": "ctypes",
}
# These rooms use no torch.
WITHOUT_TORCH = ("smddp/tensorflow", "smddp/modelparallel/tensorflow")


def sources() -> dict[str, ast.Module]:
    """Returns the parsed files of the project that may use torch, without the one for names."""
    found = {}
    for top in ("smddp", "smdistributed"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if path != OWN and not name.startswith(WITHOUT_TORCH):
                found[name] = ast.parse(path.read_text())
    return found


@functools.cache
def private_of_torch() -> frozenset[str]:
    """Returns the private names of the objects of torch that code comes across."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    objects = [
        *(nn.Module(), nn.Linear(1, 1), torch.zeros(1), torch.zeros(1).untyped_storage()),
        *(torch.amp.GradScaler("cpu"), torch.ops.aten.add.Tensor, torch.optim.Optimizer),
        *(dist, dist.distributed_c10d, dist.ProcessGroup, torch._C._distributed_c10d.Backend),
        *(torch._C._distributed_c10d.Backend.Options, torch._C._distributed_c10d.Work),
        *(torch._C.Future, torch._C._functions.AccumulateGrad, torch.autograd.Function),
        *(torch, torch.autograd, torch.autograd.graph, torch.autograd.forward_ad, torch.cuda),
        *(nn.modules.module, nn.modules.batchnorm, nn.utils.stateless, FakeTensorMode()),
        *(nn.Module().state_dict(), torch.utils),
    ]
    names = {name for one in objects for name in dir(one) if is_private(name)}
    noted = {part for path in internals.NAMES for part in path.split(".") if is_private(part)}
    return frozenset(names | noted)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Returns the private names that classes and modules of the project define."""
    found: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif is_self(node) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Assign) and "__slots__" in ast.unparse(node.targets[0]):
                found |= {
                    one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)
                }
    return found


def is_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


def names_from_torch(tree: ast.Module) -> set[str]:
    """Returns the names in a file that stand for modules and other things of torch."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                (alias.asname or alias.name).partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] == "torch"
            }
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def imported(node: ast.AST) -> Iterator[str]:
    """Yields the paths that an import names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(name: str, tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yields one sentence for each private name of torch that a file uses."""
    of_torch = private_of_torch()
    from_torch = names_from_torch(tree)
    for node in ast.walk(tree):
        for path in imported(node):
            parts = path.split(".")
            if parts[0] == "torch" and any(map(is_private, parts)):
                yield f"{name}:{node.lineno}: imports {path}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if is_private(text) and text in of_torch - ALLOWED.keys() - OTHERS.keys() - own:
                yield f"{name}:{node.lineno}: the name {text!r}"
            if re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", text):
                yield f"{name}:{node.lineno}: the path {text!r}"
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        text = ast.unparse(node)
        if node.attr in ALLOWED or node.attr in OTHERS or node.attr.startswith("_smp"):
            continue
        is_own = node.attr in own and (is_self(node) or node.attr not in of_torch)
        if not is_own or re.split(r"\W", text, maxsplit=1)[0] in from_torch:
            yield f"{name}:{node.lineno}: {text}"


def test_private_names_of_torch_are_used_in_one_file_only() -> None:
    trees = sources()
    own = own_names(trees)
    found = [one for name, tree in trees.items() for one in violations(name, tree, own)]
    advice = "take it from smddp/_torch_internals.py, with what needs it and what to do without it"
    assert not found, "\n".join([advice, *found])


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_map",
        "import torch._subclasses.fake_tensor",
        "from torch.nn.modules.module import _IncompatibleKeys",
        "importlib.import_module('torch.testing._internal.distributed.fake_pg')",
        "import torch as t\nt._C._swap_tensor_impl(x, y)",
        "import torch\ntorch.autograd.backward._any",
        "from torch import distributed as d\nd._any()",
        "module._forward_hooks",
        "group._get_backend(device)",
        "optimizer._made_up_yesterday",
        "getattr(optimizer, '_step_supports_amp_scaling', False)",
        "self._per_optimizer_states",
    ],
)
def test_check_of_names_can_fail(line: str) -> None:
    assert len(list(violations("a.py", ast.parse(line), {"_numbers"}))) >= 1


def test_check_of_names_knows_what_is_our_own() -> None:
    lines = "import torch\nself._numbers, module._numbers, module._buffers, sys._getframe()"
    assert not list(violations("a.py", ast.parse(lines), {"_numbers"}))


def test_classes_override_no_private_name_of_torch() -> None:
    import smddp.modelparallel.torch as package
    import smdistributed.modelparallel.torch  # noqa: F401

    made = {"_backward_cls", "_pybind11_conduit_v1_"}  # by torch and pybind11, in each class
    found = []
    for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(one.name)
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                bases = [base for base in kind.__mro__ if base.__module__.startswith("torch")]
                theirs = {name for base in bases for name in vars(base) if is_private(name)}
                mine = theirs & vars(kind).keys() - made - ALLOWED.keys()
                found += [f"{module.__name__}.{kind.__name__}.{name}" for name in mine]
    assert not found


# --- torch has them -------------------------------------------------------------------------------


def found_in_torch(path: str) -> bool:
    try:
        internals._look(path, internals.NAMES[path].example)
    except (AttributeError, ImportError):
        return False
    return True


@pytest.mark.parametrize("path", internals.NAMES)
def test_torch_has(path: str) -> None:
    entry = internals.NAMES[path]
    assert entry.feature
    assert found_in_torch(path), (
        f"torch {torch.__version__} has no {path}: {entry.feature} needs it. {entry.remedy}"
    )
    assert not internals.is_absent(entry.value)


def test_names_that_releases_spell_differently() -> None:
    assert internals._first("torch.made_up", "torch.nn.Module", "torch.nn") == "torch.nn.Module"
    assert internals._first("torch.made_up", "torch.nn.made.up") == "torch.made_up"
    found = internals._first(
        "torch.nn.Module._hooks", "torch.nn.Module._buffers", example=nn.Module
    )
    assert found == "torch.nn.Module._buffers"


def test_attributes_of_other_classes() -> None:
    """Those that are set, not read: torch has to look at them."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    fake = FakeTensor(FakeTensorMode(), torch.empty(2, device="meta"), torch.device("cpu"))
    internals.mark_as_parameter(fake)
    assert isinstance(fake, nn.Parameter)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, fused=True)
    internals.unscale_outside(optimizer)
    assert optimizer._step_supports_amp_scaling is False  # type: ignore[attr-defined]
    entries = nn.Linear(1, 1).state_dict()
    internals.set_versions_in_state_dict(entries, "here")
    assert internals.versions_in_state_dict(entries) == "here"
    assert internals.next_sequence_number() >= 0 > internals.graph_task()
    weak = internals.StorageWeakRef(torch.zeros(3).untyped_storage())  # type: ignore[no-untyped-call]
    assert internals.storage_expired(weak.cdata)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def loss() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.ones(2, requires_grad=True)
    return x.square().sum(), x


def parameters() -> list[nn.Parameter]:
    module = nn.Linear(2, 2)
    module(torch.ones(2)).sum().backward()
    return list(module.parameters())


def future() -> Any:
    made: Any = torch.futures.Future()  # type: ignore[var-annotated]
    made.set_result(1)
    return made


def averaged() -> None:
    module = nn.Linear(2, 2)
    torch.optim.swa_utils.AveragedModel(module).update_parameters(module)


def saved() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        pass


def loaded() -> None:
    stream = io.BytesIO()
    torch.save(1, stream)
    stream.seek(0)
    torch.load(stream)


# What scripts do, by the patch that has to notice it. The others need a group.
PROBES: dict[str, list[Callable[[], object]]] = {
    "MODULE_CALLS": [lambda: nn.Identity()(1)],
    "FUNCTION_APPLY": [lambda: Twice.apply(torch.ones(1))],
    "BACKWARD_PASSES": [
        lambda: loss()[0].backward(),
        lambda: torch.autograd.grad(*loss()),
        lambda: torch.autograd.backward(loss()[0]),
    ],
    "BACKWARD": [lambda: loss()[0].backward(), lambda: torch.autograd.backward(loss()[0])],
    "FUNCTIONAL_CALL": [lambda: torch.func.functional_call(nn.Identity(), {}, (1,))],
    "AVERAGED_MODEL": [averaged],
    "SAVED_TENSORS_HOOKS": [saved],
    "CLIP_NORM": [lambda: nn.utils.clip_grad_norm_(parameters(), 1)],
    "CLIP_VALUE": [lambda: nn.utils.clip_grad_value_(parameters(), 1)],
    "TOTAL_NORM": [lambda: nn.utils.get_total_norm(parameters())],
    "CLIP_WITH_NORM": [
        lambda: nn.utils.clip_grads_with_norm_(parameters(), 1, torch.ones(())),
    ],
    "NEW_MODULES": [nn.Identity],
    "NEW_PARAMETERS": [lambda: nn.Parameter(torch.ones(1)), lambda: nn.Linear(1, 1)],
    "NEW_SUBCLASSES": [lambda: nn.Parameter(torch.ones(1))],
    "LOADS": [loaded],
    "FUTURE_THEN": [lambda: future().then(print)],
    "FUTURE_ADD": [lambda: future().add_done_callback(lambda _: None)],
    "COLLECT_ALL": [lambda: torch.futures.collect_all([future()])],
}
WITH_A_GROUP = ["GET_FUTURE", "SPLIT_GROUP", "INIT_PROCESS_GROUP", "NEW_GROUP"]
PATCHES = {
    name: value for name, value in vars(internals).items() if isinstance(value, internals.Patch)
}


def counting(calls: list[int]) -> Callable[[Any], Any]:
    """Returns what makes a replacement that counts its calls."""

    def make(original: Any) -> Any:
        bound = isinstance(original, staticmethod)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return original(*args, **kwargs)

        return staticmethod(replacement) if bound else replacement

    def make_method(original: Any) -> Any:
        if "classmethod" not in type(original).__name__ and "apply" not in repr(original):
            return make(original)

        def replacement(cls: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return original.__get__(None, cls)(*args, **kwargs)

        return classmethod(replacement)

    return make_method


def test_each_patch_is_tried() -> None:
    assert {*PROBES, *WITH_A_GROUP} == set(PATCHES)
    assert list(PATCHES.values()) == internals.PATCHES


@pytest.mark.parametrize("name", PROBES)
def test_torch_calls_what_is_replaced(name: str) -> None:
    patch = PATCHES[name]
    assert patch.owner in ("smp", "smddp")
    why = f"{patch.feature} needs {patch.places[0]}: {patch.remedy}"
    before = [place.held() for place in patch.found()]
    for probe in PROBES[name]:
        calls: list[int] = []
        with patch.installed(counting(calls)):
            probe()
        assert calls, why
        assert [place.held() for place in patch.found()] == before


@on_ranks("1")
def test_torch_calls_what_is_replaced_in_groups() -> None:
    calls: dict[str, list[int]] = {name: [] for name in WITH_A_GROUP}
    with contextlib.ExitStack() as stack:
        for name in WITH_A_GROUP:
            stack.enter_context(PATCHES[name].installed(counting(calls[name])))
        dist.init_process_group("gloo")
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.get_future().wait()
        with contextlib.suppress(Exception):  # gloo cannot be split; releases say so in other ways
            dist.split_group(split_ranks=[[0]])
    assert all(calls.values()), calls


# --- patches --------------------------------------------------------------------------------------


@pytest.fixture
def patch() -> Iterator[internals.Patch]:
    """A patch of a module that stands for torch."""
    torch.made_up = types.SimpleNamespace(call=lambda: ["torch"])  # type: ignore[attr-defined]
    made = internals.Patch("torch.made_up.call", owner="nobody", feature="a test", remedy="none")
    yield made
    internals.PATCHES.remove(made)
    del torch.made_up  # type: ignore[attr-defined]


def adding(what: str) -> Callable[[Any], Any]:
    return lambda original: lambda: [what, *original()]


def call() -> list[str]:
    found: list[str] = torch.made_up.call()  # type: ignore[attr-defined]
    return found


def test_patches_are_installed_once_and_undone(patch: internals.Patch) -> None:
    original = torch.made_up.call  # type: ignore[attr-defined]
    for _ in range(2):
        patch.install(adding("ours"))
        patch.install(adding("ours"))
        assert call() == ["ours", "torch"]
        internals.undo("nobody")
        assert torch.made_up.call is original  # type: ignore[attr-defined]
        internals.undo("nobody")


def test_what_another_library_replaces_later_stays(patch: internals.Patch) -> None:
    there = torch.made_up  # type: ignore[attr-defined]
    original = there.call
    patch.install(adding("ours"))
    ours = there.call
    there.call = theirs = adding("theirs")(ours)
    internals.undo("nobody")
    assert there.call is theirs
    assert call() == ["theirs", "ours", "torch"]
    patch.install(adding("again"))  # theirs still calls ours
    assert call() == ["theirs", "ours", "torch"]
    internals.undo("nobody")
    there.call = ours  # they undo theirs
    internals.undo("nobody")
    assert there.call is original


def test_what_another_library_has_replaced_before_stays(patch: internals.Patch) -> None:
    there = torch.made_up  # type: ignore[attr-defined]
    there.call = theirs = adding("theirs")(there.call)
    patch.install(adding("ours"))
    assert call() == ["ours", "theirs", "torch"]
    internals.undo("nobody")
    assert there.call is theirs


def test_what_somebody_puts_back_is_replaced_again(patch: internals.Patch) -> None:
    there = torch.made_up  # type: ignore[attr-defined]
    original = there.call
    patch.install(adding("ours"))
    there.call = original
    patch.install(adding("ours"))
    assert call() == ["ours", "torch"]
    patch.undo()
    assert there.call is original


# --- a release that lacks some of them ------------------------------------------------------------


def import_again(gone: frozenset[str]) -> Any:
    """Imports smddp and smp again, with a torch that lacks some names; returns smp.

    The compiled module stays. Real attributes stay, too: that nothing else asks for them is proved
    above, and torch itself needs them.
    """
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("smddp", "smdistributed") and "_C" not in name:
            del sys.modules[name]
    importlib.import_module("smddp")
    text, line = OWN.read_text(), "def _look("
    assert text.count(line) == 1
    hiding = (
        "def _look(path, example=None):\n"
        "    if path in GONE:\n"
        "        raise AttributeError(path)\n"
        "    return _look_really(path, example)\n\n\n"
        "def _look_really("
    )
    found = types.ModuleType("smddp._torch_internals")
    found.GONE = gone  # type: ignore[attr-defined]
    sys.modules[found.__name__] = found
    exec(compile(text.replace(line, hiding), str(OWN), "exec"), vars(found))
    assert {path for path, one in found.NAMES.items() if found.is_absent(one.value)} == {
        path for path in gone & found.NAMES.keys() if found.NAMES[path].value is not None
    }
    smp = importlib.import_module("smdistributed.modelparallel.torch")
    for name in ("smddp.torch.functions", "smddp.bench.steps", "smddp.bench.torch_calls"):
        importlib.import_module(name)
    return smp


ALL_PATHS = [*internals.NAMES, *(place for patch in internals.PATCHES for place in patch.places)]


def import_each(groups: list[frozenset[str]]) -> None:
    for group in groups:
        import_again(group)
        if len(groups) > 1 and group is groups[0]:
            package = importlib.import_module("smddp.modelparallel.torch")
            for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(one.name)


@pytest.mark.parametrize("value", [0, 1])
def test_imports_work_whatever_torch_lacks(value: int) -> None:
    """Of any two names, an import of one of these tests lacks the first and has the second."""
    groups = [frozenset(ALL_PATHS)]
    for bit in range(len(ALL_PATHS).bit_length()):
        some = (path for number, path in enumerate(ALL_PATHS) if number >> bit & 1 == value)
        groups.append(frozenset(some))
    check_ranks(import_each, "1", groups)


@pytest.mark.exhaustive
def test_imports_work_without_each_name() -> None:
    groups = [frozenset([path]) for path in ALL_PATHS]
    for begin in range(0, len(groups), 20):
        check_ranks(import_each, "1", groups[begin : begin + 20])


def start(smp: Any, **config: Any) -> Any:
    """Makes a model, and returns its step function."""
    smp.init({"microbatches": 2, "ddp": True, "ddp_dist_backend": "gloo", **config})
    return smp.step(lambda model, x: model.backward(model(x).square().mean()))


def trained(smp: Any, module: nn.Module | None = None, **config: Any) -> Any:
    """Trains a model for a step; returns it."""
    step = start(smp, **config)
    model = smp.DistributedModel(module or nn.Linear(2, 2))
    for _ in range(2):
        step(model, torch.ones(2, 2))
    return model


def delayed(smp: Any) -> nn.Module:
    with smp.delay_param_initialization():
        return nn.Linear(2, 2)


def scaled(smp: Any, call: str) -> None:
    trained(smp)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(parameters(), lr=0.1))
    scaler = smp.amp.GradScaler("cpu")
    getattr(scaler, call)(optimizer)


def clipped(smp: Any) -> None:
    model = trained(smp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def functional(smp: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(smp)
    torch.func.functional_call(nn.Identity(), {}, (1,))


def checkpointed(smp: Any) -> None:
    start(smp, offload_activations=True)
    module = nn.Sequential(nn.Linear(2, 2))
    model = smp.DistributedModel(module)
    smp.set_activation_checkpointing(module[0])
    smp.step(lambda model, x: model.backward(model(x).sum()))(model, torch.ones(2, 2))


def described(smp: Any) -> None:
    from smddp.torch.functions import statistics

    start(smp, ddp_dist_backend="smddp")
    statistics()


def collected(smp: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start(smp, ddp_dist_backend="smddp")
    torch.futures.collect_all([future()])


def saved_whole(smp: Any) -> None:
    trained(smp).load_state_dict(nn.Linear(2, 2).state_dict())


FAKE = "torch._subclasses.fake_tensor"
# By name: what users do with the feature that needs it.
ON_ONE_RANK: dict[str, Callable[[Any], object]] = {
    "torch.utils._pytree.tree_flatten": delayed,
    "torch.utils._pytree.tree_leaves": delayed,
    f"{FAKE}.FakeTensorMode": delayed,
    f"{FAKE}.FakeTensor": delayed,
    "torch._ops.OpOverload._schema": delayed,
    "torch.UntypedStorage._cdata": delayed,
    "torch.Tensor._make_subclass": delayed,
    "torch.nn.Module._call_impl": trained,
    "torch.nn.Module._buffers": trained,
    "torch.autograd._engine_run_backward": trained,
    "torch.nn.utils.clip_grad_norm_.__wrapped__": clipped,
    "torch.nn.utils.stateless._functional_call": functional,
    "torch._C._collect_all": collected,
    "torch.amp.GradScaler._scale": lambda smp: scaled(smp, "unscale_"),
    "torch.amp.GradScaler._per_optimizer_states": lambda smp: scaled(smp, "unscale_"),
    "torch.amp.GradScaler._lazy_init_scale_growth_tracker": lambda smp: scaled(smp, "step"),
    "torch.nn.modules.module._IncompatibleKeys": saved_whole,
    "torch._C._autograd._top_saved_tensors_default_hooks": checkpointed,
    "torch.nn.modules.batchnorm._BatchNorm": lambda smp: trained(smp, fp16=True),
    "torch.distributed.distributed_c10d._get_default_group": described,
    "torch.distributed.ProcessGroup._get_backend": described,
}


def use(cases: dict[str, Callable[[Any], object]]) -> list[str]:
    """Uses each feature; returns what is wrong."""
    wrong = []
    for path, feature in cases.items():
        smp = import_again(frozenset([path]))
        ours = sys.modules["smddp._torch_internals"]
        try:
            feature(smp)
        except Exception as error:
            causes = [error, error.__cause__]
            if not any(type(one) is ours.TorchInternalError for one in causes):
                wrong.append(f"{path}: {type(error).__name__}: {error}")
            elif f"torch {torch.__version__} has no {path}, and " not in str(error):
                wrong.append(f"{path}: the text is {error}")
        else:
            wrong.append(f"{path}: no error")
        smp.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in ("smp", "smddp"):
            ours.undo(name)
    return wrong


def use_on_one_rank(paths: list[str]) -> list[str]:
    return use({path: ON_ONE_RANK[path] for path in paths})


@pytest.mark.parametrize("part", range(3))
def test_what_is_missing_disables_one_feature(part: int) -> None:
    (wrong,) = check_ranks(use_on_one_rank, "1", [*ON_ONE_RANK][part::3])
    assert not wrong, "\n".join(wrong)


# As ON_ONE_RANK: what two partitions need.
ON_TWO_RANKS = {
    "torch.Tensor._make_wrapper_subclass": {},
    "torch._C._FunctionBase.apply": {},
    "torch.autograd.Variable._execution_engine": {},
    "torch._C._autograd._get_current_graph_task_keep_graph": {},
    f"{FAKE}.FakeCopyMode": {"auto_partition": True},
}


def use_on_two_ranks(path: str) -> str:
    smp = import_again(frozenset([path]))
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    config = {"auto_partition": False, "default_partition": 1, **ON_TWO_RANKS[path]}
    try:
        trained(smp, module, pipeline_parallel_degree=2, **config)
    except (smp.SMPError, ImportError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("path", ON_TWO_RANKS)
def test_what_is_missing_fails_a_step(path: str) -> None:
    for text in check_ranks(use_on_two_ranks, "2", path):
        assert f"torch {torch.__version__} has no {path}, and " in text


# --- smp puts everything back ---------------------------------------------------------------------


def places_of(owner: str) -> dict[str, list[Any]]:
    """Returns where the functions are that an owner replaces until it ends, by patch."""
    return {
        name: patch.found()
        for name, patch in PATCHES.items()
        if patch.owner == owner and patch.lasts
    }


def held(places: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [place.held() for place in some] for name, some in places.items()}


def replaced(places: dict[str, list[Any]], before: dict[str, list[Any]]) -> set[str]:
    now = held(places)
    return {
        name
        for name, some in before.items()
        if any(one is not other for one, other in zip(some, now[name], strict=True))
    }


@pytest.mark.parametrize(
    "config",
    [
        {
            "pipeline_parallel_degree": 2,
            "auto_partition": False,
            "default_partition": 1,
        },
        {
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 1,
            "sdp_gradient_clipping": 1e9,
        },
    ],
)
@on_ranks("2")
def test_shutdown_puts_back_what_smp_has_replaced(config: dict[str, Any]) -> None:
    import smdistributed.modelparallel.torch as smp

    places = places_of("smp")
    before = held(places)
    hooks = nn.modules.module._global_parameter_registration_hooks
    only_sharded = set() if "sharded_data_parallel_degree" in config else {"SAVED_TENSORS_HOOKS"}
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = trained(smp, module, ddp_dist_backend="auto", **config)
        losses.append([p.grad.clone() for p in model.local_parameters() if p.grad is not None])
        assert replaced(places, before) == places.keys() - only_sharded
        assert hooks
        smp.shutdown()
        assert not replaced(places, before)
        assert not hooks
    for one, other in zip(*losses, strict=True):
        assert torch.equal(one, other)


PARTS = ("torch.nn", "torch.autograd", "torch.func", "torch.optim.swa_utils", "torch._tensor")


def all_of_torch() -> dict[Any, Any]:
    """Returns the attributes of modules and classes of torch that models and gradients use."""
    found: dict[Any, Any] = {}
    for name, module in [*sys.modules.items()]:
        if not name.startswith(PARTS):
            continue
        for key, value in [*vars(module).items()]:
            found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith(PARTS):
                found |= {(value, inner): one for inner, one in vars(value).items()}
            for cell in getattr(value, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # of an empty cell
                    found[id(cell), "cell"] = cell.cell_contents
    return found


@on_ranks("1")
def test_shutdown_leaves_no_other_change() -> None:
    import smdistributed.modelparallel.torch as smp

    before = all_of_torch()
    with smp.delay_param_initialization(), smp.model_creation():
        module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))
    trained(smp, module)
    during = all_of_torch()
    smp.shutdown()
    after = all_of_torch()
    assert [key for key, value in before.items() if during[key] is not value]
    assert not [key for key, value in before.items() if after[key] is not value]
    classes = {key[0] for key in before if isinstance(key[0], type)}
    assert not [key for key in after.keys() - before.keys() if key[0] in classes]


@on_ranks("1")
def test_what_groups_of_smddp_replace_can_be_put_back() -> None:
    # `import torch` replaces the others, with SMDDP_INSTEAD_OF or for ranks of mpirun.
    internals.undo("smddp")
    places = places_of("smddp")
    before = held(places)
    for _ in range(2):
        dist.init_process_group("smddp")
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert torch.futures.collect_all([work.get_future()]).wait()
        assert replaced(places, before) == places.keys() - {"INIT_PROCESS_GROUP", "NEW_GROUP"}
        internals.undo("smddp")
        assert not replaced(places, before)
        dist.destroy_process_group()
