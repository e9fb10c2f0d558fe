"""Write a detector as a folder of C99: its networks, the integer arithmetic between them, and ./detect.

Each network is a folder as in export/c. fqvit_detect.c, the arithmetic, is the same in every export; detector.c has the
constants, the memory and the calls of the networks. docs/reference/detector-exports.md describes the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fqvit.detect.export.facts import Size, input_size, networks
from fqvit.detect.fixed import exp
from fqvit.detect.fixed.constants import Ratio, outputs, roi_input
from fqvit.detect.program import DetectorProgram
from fqvit.export.c.emit import CEmitter
from fqvit.export.c.text import Prefix, comment
from fqvit.export.c.writer import copy_templates, write_model, write_text
from fqvit.export.folder import check_free, replacing_folder, write_manifest

FORMAT = "detector c 1"
BUILT = ("detect",)
TEMPLATES = ("fqvit_detect.h", "fqvit_detect.c", "main.c", "Makefile")
OPS = ("fqvit_ops.h", "fqvit_ops.c")


def export(program: DetectorProgram, path: str | Path, size: Size | None = None) -> None:
    """Write the folder `path` atomically. An earlier export at `path` is replaced; other files there raise FqvitError.

    size: height and width of the images; None: landscape images of the largest size that the settings allow
    """
    check_free(Path(path), BUILT)
    program.verify()
    shape = input_size(program, size)
    with replacing_folder(path, BUILT) as folder:
        emitters = {}
        for name, part in networks(program, shape).items():
            (folder / name).mkdir()
            emitters[name] = write_model(part, folder / name, Prefix.of(name))
        copy_templates(folder, "fqvit.export.c", OPS)
        copy_templates(folder, "fqvit.detect.export", TEMPLATES)
        written = f"/* {comment(program.model)}, written by fqvit from {program.fingerprint()[:16]}. Do not edit. */\n"
        made = DetectorCode(program, shape, emitters)
        write_text(folder / "detector.h", written + made.header())
        write_text(folder / "detector.c", written + made.code())
        write_text(folder / "README.txt", _readme(program, shape))
        write_manifest(folder, FORMAT, {"model": program.model, "fingerprint": program.fingerprint(), "size": list(shape)})


class DetectorCode:
    """The text of detector.h and detector.c. emitters: one per network, by the name of its folder"""

    def __init__(self, program: DetectorProgram, size: Size, emitters: dict[str, CEmitter]) -> None:
        self.program, self.size, self.emitters = program, size, emitters
        self.c = program.between
        self.grids = [(-(-size[0] // stride), -(-size[1] // stride)) for stride in self.c.strides]
        self.anchors = len(self.c.anchors[0])
        head = program.boxes[0]
        deltas = head.verify().buffers[outputs(head.header, "deltas")[0].buffer].shape[0]
        self.delta_sets = deltas // 4
        self.box_side, self.mask_side = (roi_input(heads[0].header).shape[0] for heads in (program.boxes, program.masks))
        self.channels = roi_input(head.header).shape[2]

    def header(self) -> str:
        height, width = self.size
        return (
            '#ifndef FQVIT_DETECTOR_H\n#define FQVIT_DETECTOR_H\n\n#include "fqvit_detect.h"\n\n'
            f"#define DETECTOR_HEIGHT {height} /* of the resized and padded image */\n#define DETECTOR_WIDTH {width}\n"
            f"#define DETECTOR_CLASSES {self.program.classes}\n"
            f"#define DETECTOR_DETECTIONS {self.c.detections} /* at most, per image */\n"
            f"#define DETECTOR_MASK_SIDE {2 * self.mask_side}\n\nextern const fqvit_detector detector;\n\n#endif\n"
        )

    def code(self) -> str:
        includes = "".join(f'#include "{name}/model.h"\n' for name in self.emitters)
        parts = (self._memory(), self._networks(), self._constants(), self._detector())
        return f'#include "detector.h"\n\n{includes}\n' + "\n".join(parts)

    def _memory(self) -> str:
        """Return the definitions of all buffers."""
        c, classes = self.c, self.program.classes
        cells = [rows * columns for rows, columns in self.grids]
        pairs = c.proposals * classes
        levels = sum(min(cell * self.anchors, c.proposals_a_level) for cell in cells)
        longest = max(max(grid) for grid in self.grids[: c.maps])
        side = max(self.box_side, self.mask_side)
        candidates = max(levels, pairs)
        lines = ["/* ---- memory ---- */", ""]
        arena = max(emitter.plan.arena_bytes for emitter in self.emitters.values())
        lines.append(f"static uint8_t arena[{arena}]; /* used by one network at a time */")
        for i, cell in enumerate(cells[: c.maps]):
            lines.append(f"static uint8_t map_{i}[{cell * self.channels}];")
        for i, cell in enumerate(cells):
            lines.append(f"static int32_t objectness_{i}[{cell * self.anchors}], deltas_{i}[{4 * cell * self.anchors}];")
        lines += [
            f"static uint8_t *const maps[] = {{{_listed(f'map_{i}' for i in range(c.maps))}}};",
            f"static int32_t *const objectness[] = {{{_listed(f'objectness_{i}' for i in range(len(cells)))}}};",
            f"static int32_t *const deltas[] = {{{_listed(f'deltas_{i}' for i in range(len(cells)))}}};",
            "static uint8_t padded[DETECTOR_HEIGHT * DETECTOR_WIDTH * 3];",
            f"static fqvit_ranked ranked[{max(candidates, max(cells) * self.anchors)}];",
            f"static fqvit_candidate candidates[{candidates}];",
            f"static int64_t boxes[{c.proposals}][4], logits[{c.proposals * (classes + 1)}];",
            f"static int32_t box_logits[{classes + 1}], box_moves[{c.proposals * self.delta_sets * 4}];",
            f"static uint8_t roi[{side * side * self.channels}];",
            f"static int64_t sums[{longest}];",
            f"static int32_t rows[{side * longest}], columns[{side * longest}], strip[{longest * self.channels}];",
            f"static int32_t mask_logits[{4 * self.mask_side**2 * classes}];",
        ]
        return "\n".join(lines) + "\n"

    def _networks(self) -> str:
        """Return the functions that call the networks."""
        names: list[str] = []
        counts = {"map": 0, "scores": 0, "deltas": 0}
        arrays = {"map": "map", "scores": "objectness", "deltas": "deltas"}
        for output in self.program.pyramid.header.outputs:
            names.append(f"{arrays[output.kind]}_{counts[output.kind]}")
            counts[output.kind] += 1
        stages = range(self.program.stages)

        def cases(kind: str, results: str) -> str:
            return "".join(f"    if (stage == {i}) {kind}_{i}_run(roi_codes, arena, {results});\n" for i in stages)

        return (
            "/* ---- networks ---- */\n\nstatic void run_pyramid(const uint8_t *image)\n{\n"
            f"    pyramid_run(image, arena, {_listed(names)});\n}}\n\n"
            "static void run_boxes(uint32_t stage, const uint8_t *roi_codes, int32_t *classes, int32_t *moves)\n{\n"
            f"{cases('boxes', 'classes, moves')}}}\n\n"
            "static void run_masks(uint32_t stage, const uint8_t *roi_codes, int32_t *pixels)\n{\n"
            f"{cases('masks', 'pixels')}}}\n"
        )

    def _constants(self) -> str:
        c = self.c
        zeros = [output.zero for output in outputs(self.program.pyramid.header, "map")]
        halves = [pair for level in c.anchors for pair in level]
        lines = [
            "/* ---- constants ---- */",
            "",
            f"static const uint32_t strides[] = {{{_listed(c.strides)}}};",
            f"static const uint32_t grids[][2] = {{{_listed(f'{{{a}, {b}}}' for a, b in self.grids)}}};",
            f"static const int32_t halves[][2] = {{{_listed(f'{{{a}, {b}}}' for a, b in halves)}}};",
            f"static const int64_t areas[] = {{{_listed(c.areas or (0,))}}};",
            f"static const int32_t map_zeros[] = {{{_listed(zeros)}}};",
            _ratios("objectness_ratios", c.objectness),
            _ratios("delta_ratios", [ratio for level in c.deltas for ratio in level]),
            _ratios("box_delta_ratios", [ratio for stage in c.box_deltas for ratio in stage]),
            _ratios("class_ratios", c.classes),
            _ratios("mask_ratios", c.mask_logits),
        ]
        for kind, heads, every in (("box", self.program.boxes, c.box_squares), ("mask", self.program.masks, c.mask_squares)):
            lines += [_ratios(f"{kind}_input_ratios_{i}", ratios) for i, ratios in enumerate(every)]
            entries = []
            for i, head in enumerate(heads):
                roi = roi_input(head.header)
                entries.append(f"{{{roi.shape[0]}, {roi.zero}, {2**roi.bits - 1}, {kind}_input_ratios_{i}}}")
            lines.append(f"static const fqvit_roi_input {kind}_inputs[] = {{{_listed(entries)}}};")
        powers = [int(value) for table in (exp.HIGH, exp.MIDDLE, exp.LOW) for value in table]
        rows = ",\n".join("    " + _listed(f"{value}u" for value in powers[i : i + 8]) for i in range(0, len(powers), 8))
        lines.append(f"static const uint32_t powers[] = {{\n{rows}}};")
        return "\n".join(lines) + "\n"

    def _detector(self) -> str:
        c = self.c
        fields = {
            "height": self.size[0],
            "width": self.size[1],
            "padding": f"{{{_listed(c.padding)}}}",
            "levels": len(c.strides),
            "maps": c.maps,
            "stages": c.stages,
            "anchors": self.anchors,
            "classes": self.program.classes,
            "channels": self.channels,
            "delta_sets": self.delta_sets,
            **{name: name for name in ("strides", "grids", "halves", "areas", "map_zeros")},
            "objectness": "objectness_ratios",
            "deltas": "delta_ratios",
            "box_deltas": "box_delta_ratios",
            "class_logits": "class_ratios",
            "mask_logits": "mask_ratios",
            **{name: name for name in ("box_inputs", "mask_inputs", "powers")},
            **{name: getattr(c, name) for name in ("log_limit", "proposal_iou", "iou", "score", "mask")},
            **{name: getattr(c, name) for name in ("proposals_a_level", "proposals", "detections")},
            **{name: name for name in ("run_pyramid", "run_boxes", "run_masks")},
        }
        memory = ["padded", "maps", "objectness", "deltas", "ranked", "candidates", "boxes", "logits", "box_logits"]
        memory += ["roi", "sums", "rows", "columns", "strip", "mask_logits"]
        inner = ", ".join([*(f".{name} = {name}" for name in memory), ".box_deltas = box_moves"])
        lines = "".join(f"    .{name} = {value},\n" for name, value in fields.items())
        return f"const fqvit_detector detector = {{\n{lines}    .memory = {{{inner}}},\n}};\n"


def _ratios(name: str, ratios: Sequence[Ratio]) -> str:
    return f"static const fqvit_ratio {name}[] = {{{_listed(f'{{{r.mult}, {r.shift}}}' for r in ratios)}}};"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _readme(program: DetectorProgram, size: Size) -> str:
    s = program.settings
    networks_text = ", ".join(name.replace(".", "_") for name, _ in program.parts())
    rule = "as cv2.resize does (INTER_LINEAR)" if program.resize == "opencv" else "bilinear, with one rounding"
    return f"""\
{comment(program.model)} as C99, without floats. Written by fqvit from detector
{program.fingerprint()}.

    make
    ./detect pixels.rgb HEIGHT WIDTH [ORIGINAL_HEIGHT ORIGINAL_WIDTH [masks.bin]]

prints one object per line, best first: label, score in 2^-24, and x1 y1 x2 y2 in 1/256 pixel of the original image.
masks.bin gets one mask per object, with one byte per pixel of the original image.

pixels.rgb has HEIGHT rows of WIDTH pixels of 3 bytes (red, green, blue). Resize the image, with its aspect ratio kept, to the
largest size with a short side of at most {s.short} and a long side of at most {s.long}, {rule}. This
export is for images that become {size[0]} x {size[1]} pixels when both sides are rounded up to multiples of 32. The code
pads them.

fqvit_detect.c   the arithmetic between the networks: proposals, NMS, RoIAlign, box decoding, masks
detector.c       constants, memory and calls of the networks
{networks_text}: the networks; their model.h describes inputs and outputs

To use the detector in firmware, compile every .c file except main.c with -I. and call fqvit_detect() and fqvit_paste(),
declared in fqvit_detect.h. The code needs only <stdint.h> and <stddef.h>.
"""
