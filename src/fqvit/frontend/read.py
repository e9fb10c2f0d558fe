"""Read the ATen graph of an exported module into a draft of steps and views.

Ops whose operands are all constant are computed here: position tables, masks, rotary tables and resampled embeddings become
constants. Ops that only move elements are applied to the views (see draft.py). All other ops have a handler in elementwise.py,
norms.py, spatial.py, resample.py or attention.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from fqvit.errors import FqvitError
from fqvit.frontend import attention, elementwise, norms, resample, spatial
from fqvit.frontend.draft import Step, View, concatenate, constant
from fqvit.frontend.operands import Pending, Reader, drop_leading_ones

HANDLERS: dict[str, Callable[..., Any]] = {
    **elementwise.HANDLERS,
    **norms.HANDLERS,
    **spatial.HANDLERS,
    **resample.HANDLERS,
    **attention.HANDLERS,
}

# Ops that return elements of their first argument in another order or shape. They work on an index as on any other tensor.
MOVES = {
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "numpy_T", "flatten", "unflatten", "squeeze", "unsqueeze",
    "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "expand", "expand_as",
    "repeat", "gather",
    "roll", "flip", "rot90", "index", "index_select", "unfold", "movedim", "swapaxes", "swapdims", "pixel_shuffle",
    "pixel_unshuffle", "repeat_interleave", "broadcast_to", "view_as", "reshape_as", "hsplit", "vsplit", "moveaxis",
}  # fmt: skip
# Ops that return their first argument in inference.
IDENTITIES = {
    "dropout", "dropout_", "feature_dropout", "alpha_dropout", "clone", "contiguous", "alias", "detach", "detach_",
    "lift_fresh_copy", "to", "_to_copy", "type_as", "float", "lift_fresh", "native_dropout",
}  # fmt: skip
IGNORED = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_size", "sym_constrain_range_for_size"}
RANDOM = {"rand", "rand_like", "randn", "randn_like", "randint", "randperm", "bernoulli", "multinomial", "normal"}


def read(program: ExportedProgram, images: Step) -> list[View]:
    """Return the outputs of an exported module as views. images: the step that stands for its input"""
    _, height, width = (images.shape[2], images.shape[0], images.shape[1])
    index = torch.arange(images.size).view(height, width, -1).permute(2, 0, 1)[None]
    reader = Reader()
    arguments: list[Any] = []
    tensors: Mapping[str, Any] = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    for node in program.graph.nodes:
        if node.op == "placeholder":
            known = names.get(node.name)
            arguments.append(View((images,), index) if known is None else tensors[known].detach())
    outputs = _run(program.graph_module, arguments, reader)
    flat = _flat(outputs)
    if any(isinstance(x, Pending) for x in flat):
        raise FqvitError("model: an output is a norm or a square, which is not supported.")
    views = [
        constant(x) if isinstance(x, Tensor) else x
        for x in flat
        if isinstance(x, View) or (isinstance(x, Tensor) and x.is_floating_point())
    ]
    if not views:
        raise FqvitError("model: has no floating-point output.")
    return [view.reshaped(*(drop_leading_ones(view.shape) or (1,))) for view in views]


def _run(module: fx.GraphModule, arguments: list[Any], reader: Reader) -> Any:
    values: dict[fx.Node, Any] = {}
    inputs = iter(arguments)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(module)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: values[n])
        else:
            args = fx.node.map_arg(node.args, lambda n: values[n])
            kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
            reader.path = _path(node, reader.path)
            values[node] = _call(node, args, dict(kwargs), reader)
            if _in_place(node) and node.args:  # later ops may read the modified argument itself
                values[node.args[0]] = values[node]
    return None


def _in_place(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", "")
    return name.endswith("_") and not name.startswith("_")


def _call(node: fx.Node, args: Any, kwargs: dict[str, Any], reader: Reader) -> Any:
    """Compute one op. Raises FqvitError with the module's path and the op."""
    target: Any = node.target
    name = str(getattr(target, "_opname", getattr(target, "__name__", target)))
    where = f"{reader.path or 'model'}: aten.{name}"
    if name in RANDOM and node.users:
        raise FqvitError(
            f"{where} returns different numbers in every run, which is not supported. Pass fixed numbers to the module."
        )
    try:
        result = _apply(target, name, args, kwargs, reader)
    except FqvitError:
        raise
    except NotImplementedError as error:
        raise FqvitError(f"{where} {error}.") from None
    except Exception as error:  # torch failed, or a handler assumed other arguments
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise FqvitError(f"{where} with these arguments is not supported ({reason}).") from error
    wanted = node.meta.get("val")
    if isinstance(result, View) and isinstance(wanted, Tensor):
        if result.shape != tuple(wanted.shape):
            raise FqvitError(f"{where}: captured with shape {list(result.shape)}, expected {list(wanted.shape)}.")
        if not wanted.is_floating_point():
            raise FqvitError(f"{where} computes {wanted.dtype} from the image, which is not supported.")
    return result


def _apply(target: Any, name: str, args: Any, kwargs: dict[str, Any], reader: Reader) -> Any:
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _call_wrapped(target, args, reader)
    if not any(isinstance(x, View | Pending) for x in _flat([args, kwargs])):
        return target(*args, **kwargs)
    if target is operator.getitem:
        return args[0][args[1]]
    if name in IGNORED:
        return None
    handler = HANDLERS.get(name if name in HANDLERS else name.rstrip("_"))
    if handler is not None:
        return handler(reader, *args, **kwargs)
    if name in IDENTITIES:
        return args[0]
    if name in MOVES:
        return _move(target, args, kwargs)
    if name in ("cat", "concat", "concatenate"):
        views = [x if isinstance(x, View) else constant(x) for x in args[0]]
        views = [view for view in views if view.index.numel()]
        return concatenate(views, args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if name == "stack":
        axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        position = axis if axis >= 0 else axis + len(args[0][0].shape) + 1
        views = [x if isinstance(x, View) else constant(x) for x in args[0]]
        return concatenate([view.moved(lambda x: x.unsqueeze(position)) for view in views], position)
    if name in ("constant_pad_nd", "pad"):
        return _pad(args, kwargs)
    raise NotImplementedError("is not supported")


def _call_wrapped(target: Any, args: Any, reader: Reader) -> Any:
    """Run the body of an op that only changes a mode: gradients on or off, autocast."""
    modules = [i for i, x in enumerate(args) if isinstance(x, fx.GraphModule)]
    if len(modules) != 1:
        raise NotImplementedError("is not supported")
    return _run(args[modules[0]], list(args[modules[0] + 1 :]), reader)


def _move(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    view = args[0]
    if isinstance(view, Pending):  # a norm that is broadcast to the shape of the value it divides
        return view
    if not isinstance(view, View):
        raise NotImplementedError("with an index that depends on the image is not supported")

    def shape_only(x: Any) -> Any:  # expand_as and view_as read only the shape of their second argument
        return torch.empty(x.shape) if isinstance(x, View) else x

    rest = [shape_only(x) for x in args[1:]]

    def apply(tensor: Tensor) -> Any:
        if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            return tensor.reshape(*rest)  # the index may have other strides than the value
        return target(tensor, *rest, **kwargs)

    index = apply(view.index)
    if isinstance(index, Tensor):
        return view.moved(apply)
    parts = [apply(tensor) if tensor is not None else [None] * len(index) for tensor in (view.scale, view.offset)]
    return [View(view.steps, i, s, o) for i, s, o in zip(index, *parts, strict=True)]


def _pad(args: Any, kwargs: dict[str, Any]) -> View:
    view: View = args[0]
    widths = args[1]
    if isinstance(args[2] if len(args) > 2 else None, str) and args[2] != "constant":
        mode = args[2]
        return view.moved(lambda x: torch.nn.functional.pad(x.double(), widths, mode).to(x.dtype))
    value = kwargs.get("value", args[-1] if len(args) > 2 and not isinstance(args[-1], str) else 0.0) or 0.0
    padded = view.moved(lambda x: x, lambda x, empty: torch.nn.functional.pad(x, widths, value=empty))
    if value == 0:
        return padded
    border = torch.nn.functional.pad(torch.zeros(view.shape, dtype=torch.float64), widths, value=float(value))
    return padded.shifted(border)


def _path(node: fx.Node, before: str) -> str:
    """Return the path of the module that an op belongs to, "" for the model itself; the previous path if it is not recorded."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    if not paths:
        return before
    path = paths[-1]
    # Older versions of torch export paths in the form L['self'].blocks.0
    return path.removeprefix("L['self']").removeprefix(".")


def _flat(x: Any) -> list[Any]:
    if isinstance(x, list | tuple):
        return [y for part in x for y in _flat(part)]
    if isinstance(x, dict):
        return [y for part in x.values() for y in _flat(part)]
    return [x]
