"""Known silent errors of Hopper's compilers, counted in what Triton compiled; `kernels/README.md` names them.

A wgmma, Hopper's matrix product, runs beside the program until the program waits for it. Its operand B lies
in shared memory, A there or in registers ("register-A").
"""

import itertools
import re
import subprocess
import tempfile


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

_ALLOC = re.compile(r"(%[\w$.-]+) = ttg\.local_alloc : .*!ttg\.memdesc<([12])x")
_VIEW = re.compile(r"(%[\w$.-]+) = ttg\.memdesc_\w+ (%[\w$.-]+)")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %[\w$.-]+, (%[\w$.-]+)")
_PENDING = re.compile(r"warp_group_dot_wait .*pendings = (\d+)")
_WARPS = re.compile(r'"ttg\.num-warps" = (\d+)')
_BARRIERS = ("ttg.async_wait ", "ttg.barrier", "gpu.barrier", "ttg.local_barrier")


def refilled(ttgir: str) -> int:
    """Tiles that are copied into a place in shared memory where a product may still read the one before.

    The pipeliner gives a tile one place where the program also reads it into registers. It counts the wait for that
    reading, but not the products' reading, which ends later. Of more than four warps each four wait for their own
    products alone (triton issue 11047), so only a barrier ends the reading. Two places are too few for them where
    products of a step still run when it copies: their wait is behind the next step's barrier.
    """
    warps = _WARPS.search(ttgir)
    groups = warps is not None and int(warps[1]) > 4
    tiles: dict[str, str] = {}  # a view of a tile with one or two places → the tile
    places: dict[str, int] = {}
    running: list[set[str]] = []  # of each product that may still run: the tiles that it reads
    others: set[str] = set()  # tiles that products of other warps may still read
    found = set()
    for line in ttgir.splitlines():
        if alloc := _ALLOC.search(line):
            tiles[alloc[1]], places[alloc[1]] = alloc[1], int(alloc[2])
        elif (view := _VIEW.search(line)) and view[2] in tiles:
            tiles[view[1]] = tiles[view[2]]
        elif wait := _PENDING.search(line):
            ended = len(running) - min(int(wait[1]), len(running))
            others.update(*running[:ended] if groups else ())
            running = running[ended:]
        elif any(barrier in line for barrier in _BARRIERS):
            others.clear()
        elif "warp_group_dot " in line and "isAsync = true" in line:
            operands = line.partition("warp_group_dot ")[2].split(" {")[0]
            running.append({tiles[x] for x in _VALUE.findall(operands) if x in tiles})
        elif copy := _COPY.search(line):
            tile = tiles.get(copy[1], "")
            reads = set().union(*running)
            if places.get(tile) == 1:
                found |= {tile} & (reads | others)
            elif groups:
                found |= {tile} & reads
    return len(found)
