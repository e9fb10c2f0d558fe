"""Name and describe the outputs of a program in the same way in every export."""

from __future__ import annotations

from fqvit.ir.program import Header, Program, Verified


def output_names(header: Header) -> tuple[str, ...]:
    """Return one name per output, in order, all different.

    An output without a name is called by its kind. If several have the same kind, the second one is `tokens.2`, and so on.
    """
    names: list[str] = []
    taken = {output.name for output in header.outputs}
    for output in header.outputs:
        name, count = output.name or output.kind, 1
        while name in names or (count > 1 and name in taken):
            count += 1
            name = f"{output.kind}.{count}"
        names.append(name)
    return tuple(names)


def describe_outputs(program: Program, verified: Verified) -> list[dict[str, object]]:
    """Return the description of every output for JSON: value = (integer - zero) scale 2^alpha[c].

    alpha: one exponent per channel; empty if the channels have the same scale
    """
    described: list[dict[str, object]] = []
    for name, output in zip(output_names(program.header), program.header.outputs, strict=True):
        value = verified.buffers[output.buffer]
        alpha = [] if output.alpha is None else program.constants[output.alpha].tolist()
        described.append(
            {
                "name": name,
                "kind": output.kind,
                "buffer": output.buffer,
                "dtype": value.dtype,
                "shape": list(value.shape),
                "scale": output.scale,
                "zero": output.zero,
                "alpha": alpha,
            }
        )
    return described
