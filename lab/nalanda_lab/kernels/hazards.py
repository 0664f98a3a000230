"""Known silent errors of Hopper's compilers, counted in what Triton compiled; `kernels/README.md` names them.

A wgmma, Hopper's matrix product, runs beside the program until the program waits for it. Its operand B lies
in shared memory, A there or in registers ("register-A").
"""

import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable


def register_a(ptx: str) -> int:
    """wgmma instructions with A in registers."""
    return len(re.findall(r"wgmma\.mma_async\.\S+\s*\{[^}]*\},\s*\{", ptx))


# ---------------------------------------------------------------- registers of A written before the wait

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?)\s*;")
_WITHOUT_RESULT = (
    "ISETP",
    "FSETP",
    "DSETP",
    "HSETP2",
    "FCHK",
    "R2P",
    "BAR",
    "BR",
    "CALL",
    "RET",
    "WARPSYNC",
)
_TWO_WORDS = re.compile(r"CS2R|D(ADD|MUL|FMA)|[FI]2F\.F64|.*\.(64|WIDE)\b")


def machine_code(cubin: bytes) -> str:
    """What Triton's nvdisasm prints."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def overwritten(text: str) -> int:
    """wgmma instructions in machine code whose registers of A may be written before the wait for them."""
    code, labels = (
        [],
        {},
    )  # instructions: predicate, name, operands; the instruction after each label
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append((found[1] or "", found[2], found[3]))
    products = (
        i
        for i, (_, name, args) in enumerate(code)
        if "GMMA." in name and re.match(r"R\d+, R\d", args)
    )
    return sum(_written_early(code, labels, i) for i in products)


def _written_early(code: list[tuple[str, str, str]], labels: dict[str, int], product: int) -> bool:
    """Whether a path from the product comes to a write of its A before a wait that covers it.

    "gsb0" ends a group of products; DEPBAR n waits until at most n groups run.
    """
    first = int(code[product][2].split(", ")[1].removeprefix("R"))
    a, ends = range(first, first + 4), "gsb0" in code[product][2]
    seen, todo = set(), [(product + 1, 0 if ends else -1)]
    while todo:
        i, later = todo.pop()  # an instruction; how many groups ended after the product's own
        if (i, later) in seen or i >= len(code):
            continue
        seen.add((i, later))
        predicate, name, args = code[i]
        if name == "WARPGROUP.DEPBAR.LE" and 0 <= int(args.split("0x")[1], 16) <= later:
            continue
        if any(x in a for x in _written(name, args)):
            return True
        if "GMMA." in name and "gsb0" in args:
            later = min(later + 1, 8)
        target = re.search(r"\.L_x_\d+", args) if name.startswith("BRA") else None
        if target:
            todo.append((labels[target[0]], later))
        if not (target or name == "EXIT") or predicate or "P" in args.split("`")[0]:
            todo.append((i + 1, later))
    return False


def _written(name: str, args: str) -> range:
    """Numbers of the registers that an instruction writes."""
    result = re.match(r"(?:!?U?P(?:\d|T), )*R(\d+)\b", args)
    if result is None or name.startswith(_WITHOUT_RESULT):
        return range(0)
    count = 1
    if "GMMA." in name:
        count = int(name.split("x")[1]) // 2  # 64x128x16: 128 columns
    elif name.startswith(("HMMA", "IMMA")) or ".128" in name or name.endswith("M88.4"):
        count = 4
    elif _TWO_WORDS.match(name) or name.endswith("M88.2"):
        count = 2
    return range(int(result[1]), int(result[1]) + count)


# -------------------------------------------------------------- products that read a product's transpose

_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULT = re.compile(r"\s*(%[\w$.-]+)(?::(\d+))? = \"?([\w.]+)\"?(.*)")
_ENTRYWISE = ("arith.", "math.", "tt.fp_to_fp", "tt.bitcast", "tt.clampf", "tt.extern_elementwise")


def transposed(ttir: str) -> int:
    """Products with an operand that is the transpose of a product's result.

    Between the product, the transpose of its tile (two axes) and the next product may stand operations that
    give an entry from entries at the same place, and values that loops and branches carry.
    """
    kinds, sources = _graph(ttir)

    def reads(operand: str) -> bool:
        seen, todo = set(), [(operand, False)]  # a value; whether a transpose follows it
        while todo:
            value, turned = todo.pop()
            kind = kinds.get(value, "")
            if kind == "tt.dot" and turned:
                return True
            turned |= kind == "transpose"
            if (value, turned) not in seen and kind.startswith(
                ("transpose", "carried", *_ENTRYWISE)
            ):
                todo += [(x, turned) for x in sources[value]]
            seen.add((value, turned))
        return False

    products = [sources[value] for value, kind in kinds.items() if kind == "tt.dot"]
    return sum(reads(a) or reads(b) for a, b, _ in products)


def _graph(ttir: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """By value: the operation that gives it, and that operation's operands."""
    kinds: dict[str, str] = {}
    sources: dict[str, list[str]] = {}
    regions: list[
        list[list[str]]
    ] = []  # of open braces: the names of each value that the region carries
    for line in ttir.splitlines():
        line, carried = line.split(" loc(")[0], []
        if found := _RESULT.match(line):
            name, count, kind, rest = found.groups()
            if kind in ("scf.for", "scf.if"):
                carried = [[f"{name}#{i}"] for i in range(int(count))] if count else [[name]]
                starts = re.findall(
                    rf"({_VALUE.pattern}) = ({_VALUE.pattern})", rest.partition("iter_args")[2]
                )
                for names, (inside, start) in zip(
                    carried, starts, strict=False
                ):  # branches have no starts
                    names.append(inside)
                    sources[inside] = [start]
                for inside in itertools.chain(*carried):
                    kinds[inside] = "carried"
                    sources.setdefault(inside, [])
            else:
                turns = kind == "tt.trans" and "array<i32: 1, 0>" in rest
                kinds[name], sources[name] = "transpose" if turns else kind, _VALUE.findall(rest)
        elif line.lstrip().startswith("scf.yield") and regions:
            for names, value in zip(regions[-1], _VALUE.findall(line), strict=True):
                for name in names:
                    sources[name].append(value)
        opened = line.count("{") - line.count("}")
        regions += [carried] * opened
        if opened < 0:
            del regions[opened:]
    return kinds, sources


# ------------------------------------------------- tiles refilled while a product reads them

_NAME = r"%[\w$.-]+(?:#\d+)?"
_ALLOC = re.compile(rf"({_NAME}) = ttg\.local_alloc : .*!ttg\.memdesc<(\d+)x")
_VIEW = re.compile(rf"({_NAME}) = ttg\.memdesc_\w+ ({_NAME})(?:\[({_NAME}))?")
_COPY = re.compile(rf"({_NAME}) = ttg\.async_copy_global_to_local {_NAME}, ({_NAME})")
_BULK = re.compile(r"ttng\.async_tma_copy_global_to_local (.*)")
_COMMIT = re.compile(r"ttg\.async_commit_group(.*)")
_PRODUCT = re.compile(r"ttng\.(?:warp_group_dot|tc_gen5_mma) (%[^{]*)")
_SIGNAL = re.compile(rf"ttng\.wait_barrier ({_NAME})")
_STEP = re.compile(
    r"(@!?%p\d+\s+)?\b(bar\.sync|barrier(?:\.cta)?\.sync|cp\.async\.(?:commit_group|c[ag]|bulk\S*shared::c\S*)"
    r"|wgmma\.(?:commit|wait)_group|tcgen05\.commit|mbarrier\.try_wait|bra|ret)\b([^;]*);"
)
_ENDS = ("wgmma.commit_group", "tcgen05.commit")  # one for each product of TTGIR
Access = tuple[int, dict[str, str], str]
"""A product or a group of copies: its line, its tiles by the number of their place, the barrier that it signals."""


def refilled(ttgir: str, ptx: str) -> int:
    """Tiles that are copied into a place in shared memory where a product may still read the one before.

    Triton's pipeliner copies a later step's tile while products run. Between the product that last read its place
    and the copy must stand the wait for that product, then a bar.sync: of more than four warps each four wait for
    their own products alone (triton issue 11047). The pipeliner forgets the wait where the program also reads the
    tile into registers. TTGIR tells the tiles and places of products and copies; PTX, what stands between.
    """
    places, products, copies, signals = _accesses(ttgir)
    code, labels = _steps(ptx)
    ends = [i for i, (_, name, _) in enumerate(code) if name in _ENDS]
    fills = _fills(code)
    read = {tile for _, tiles, _ in products for tile in tiles}
    if (len(ends), len(fills)) != (len(products), len(copies)):
        # Which instruction is which is unknown: any tile may be refilled.
        return len(read & {tile for _, tiles, _ in copies for tile in tiles})

    number, found = _numbers(ttgir), set()
    copy_at = dict(zip(fills, copies, strict=True))
    for (line, reads, barrier), end in zip(products, ends, strict=True):
        for fill, steps in _uncovered(code, labels, end, barrier in signals):
            if fill not in copy_at:
                continue  # not the first of its group
            above, fresh, _ = copy_at[fill]
            # A copy above the product in the loop is met in the next step.
            steps += above < line
            for tile in reads.keys() & fresh.keys():
                # The place that is filled was last read so many steps ago.
                ago = (number(reads[tile]) - number(fresh[tile])) % places[tile]
                found |= {tile} if steps >= ago else set()
    return len(found)


def _accesses(ttgir: str) -> tuple[dict[str, int], list[Access], list[Access], set[str]]:
    """How many places each tile has; the products; the groups of copies; the barriers that are waited for."""
    places: dict[str, int] = {}
    views: dict[str, tuple[str, str]] = {}  # of a view: its tile and place
    copied: dict[str, tuple[str, str]] = {}  # of a copy's token: the same
    products, copies, signals = [], [], set()
    for i, line in enumerate(ttgir.splitlines()):
        if alloc := _ALLOC.search(line):
            views[alloc[1]], places[alloc[1]] = (alloc[1], ""), int(alloc[2])
        elif (view := _VIEW.search(line)) and view[2] in views:
            tile, place = views[view[2]]
            views[view[1]] = tile, view[3] or place
        elif product := _PRODUCT.search(line):
            values = _VALUE.findall(product[1].partition(" : ")[0])
            reads = dict(views[x] for x in values[:2] if x in views)
            barrier = re.search(rf"({_NAME})\[", product[1])
            products.append((i, reads, barrier[1] if barrier else ""))
        elif signal := _SIGNAL.search(line):
            signals.add(signal[1])
        elif copy := _COPY.search(line):
            copied[copy[1]] = views.get(copy[2], ("", ""))
        elif commit := _COMMIT.search(line):
            tokens = _VALUE.findall(commit[1])
            copies.append((i, dict(copied[x] for x in tokens if x in copied), ""))
        elif bulk := _BULK.search(line):
            filled = [views[x] for x in _VALUE.findall(bulk[1]) if x in views]
            copies.append((i, dict(filled[:1]), ""))
    return places, products, copies, signals


def _numbers(ttgir: str) -> Callable[[str], int]:
    """A function that gives the number of a place, which loops count up, in the first step."""
    operations, starts = {}, {}
    for line in ttgir.splitlines():
        if found := _RESULT.match(line):
            operations[found[1]] = found[3], found[4]
        starts |= dict(re.findall(rf"({_NAME}) = ({_NAME})", line.partition("iter_args")[2]))

    def number(value: str) -> int:
        kind, rest = operations.get(value, ("", ""))
        used = _VALUE.findall(rest)
        if constant := kind == "arith.constant" and re.match(r"\s*(-?\d+)", rest):
            return int(constant[1])
        if kind == "arith.select":  # 0 after the last place, else the next
            return number(used[2])
        if kind == "arith.addi":
            return number(used[0]) + number(used[1])
        return number(starts[value]) if value in starts else 0

    return number


Code = list[tuple[bool, str, str]]  # instructions: whether on a condition, name, operands


def _steps(ptx: str) -> tuple[Code, dict[str, int]]:
    """The instructions of PTX that matter here, and the one after each label."""
    code: Code = []
    labels = {}
    for line in ptx.splitlines():
        if label := re.match(r"\s*(\$\w+):", line):
            labels[label[1]] = len(code)
        code += [(bool(condition), name, args) for condition, name, args in _STEP.findall(line)]
    return code, labels


def _fills(code: Code) -> list[int]:
    """The first instruction of each group of asynchronous copies; a bulk copy is a group."""
    fills, first = [], None
    for i, (_, name, _) in enumerate(code):
        if name.startswith("cp.async.bulk"):
            fills.append(i)
        elif name == "cp.async.commit_group":
            fills.append(i if first is None else first)
            first = None
        elif name.startswith("cp.async") and first is None:
            first = i
    return fills


def _uncovered(
    code: Code, labels: dict[str, int], end: int, waited_at_once: bool
) -> set[tuple[int, int]]:
    """Copies that a path from a product's end reaches before its wait and a bar.sync, each with the steps between.

    waited_at_once: whether the next wait for a barrier is that of the product; else it is of the step before.
    """
    found, seen = set(), set()
    # An instruction; groups of products begun since; whether the product was waited for; steps begun since.
    todo = [(end + 1, 0, False, 0)]
    while todo:
        i, later, waited, steps = todo.pop()
        if (i, later, waited, steps) in seen or i >= len(code):
            continue
        seen.add((i, later, waited, steps))
        condition, name, args = code[i]
        if name.startswith("bar") and waited:
            continue
        if name.startswith("cp.async"):
            found.add((i, steps))
        if name in _ENDS:
            later, steps = min(later + 1, 8), min(steps + (i == end), 3)
        if name == "wgmma.wait_group":
            waited |= int(re.findall(r"\d+", args)[-1]) <= later
        if name == "mbarrier.try_wait":
            waited |= waited_at_once or steps > 0
        target = re.search(r"\$\w+", args) if name == "bra" else None
        if target:
            todo.append((labels[target[0]], later, waited, steps))
        if condition or name not in ("bra", "ret"):
            todo.append((i + 1, later, waited, steps))
    return found
