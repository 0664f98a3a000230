"""Fixes Triton's interpreter for tests. Import it before any module that defines kernels.

    python -c "import interpreter; ..."

The interpreter of Triton 3.6 to 3.9 has five faults: autotuned kernels ask for a GPU driver; `range` gives
Python integers, so `i.to(tl.int64)` fails; bf16 is computed on its raw bits and truncated instead of rounded;
a comparison of numbers becomes a mask of integers, which Triton 3.9 refuses; libdevice returns None. This
module fixes them and halves the interpreter's time. Programs run one after another, so races never show. It
accepts code that the compiler refuses, so other tests compile the kernels.
"""

import ast
import functools
import inspect
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime import driver

BF16 = tl.bfloat16


# ------------------------------------------------------------------------------- autotuning without a driver


class _NoDriver:
    def get_benchmarker(self):
        return lambda function, quantiles=None, **options: [
            0.0,
            0.0,
            0.0,
        ]  # the first configuration wins

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"no GPU driver in the interpreter: {name}")


driver.set_active(_NoDriver())  # pyrefly: ignore[bad-argument-type]


# --------------------------------------------------------------------------------- range() counts in scalars


def _integer(x) -> int:
    if isinstance(x, tl.tensor):
        return int(np.asarray(x.handle.data).reshape(()))
    return int(getattr(x, "value", x))


def _scalar_range(*bounds, **options):
    for i in range(*(_integer(x) for x in bounds)):
        yield interpreter.interpreter_semantic.to_tensor(i, False)


def _visit_for(self, node):
    self.generic_visit(node)
    if isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) in ("range", "tl.range"):
        node.iter.func = ast.copy_location(ast.Name("_scalar_range", ast.Load()), node.iter.func)
    return node


interpreter._scalar_range = _scalar_range  # the interpreter's globals are the kernel's
interpreter.ASTTransformer.visit_For = _visit_for


# ------------------------------------------------------------ bf16: computed in fp32, rounded to nearest even


def _up(handle) -> np.ndarray:
    if handle.dtype.scalar == BF16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _down(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


def _half(*handles) -> bool:
    return any(handle.dtype.scalar == BF16 for handle in handles)


def _handle(x: np.ndarray):
    """Of a comparison, or of a result in fp32."""
    if x.dtype == bool:
        return interpreter.TensorHandle(x, tl.int1)
    return interpreter.TensorHandle(_down(x), BF16)


def _float(handle):
    return (
        interpreter.TensorHandle(_up(handle), tl.float32) if handle.dtype.scalar == BF16 else handle
    )


def _mend_bf16(Builder) -> None:
    binary, unary, ternary = Builder.binary_op, Builder.unary_op, Builder.ternary_op
    fma, dot, rsqrt, erf = (
        Builder.create_fma,
        Builder.create_dot,
        Builder.create_rsqrt,
        Builder.create_erf,
    )
    cast, convert = Builder.cast_impl, Builder.create_fp_to_fp
    bitwise = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)

    def binary_op(self, a, b, op):
        if _half(a, b) and op not in bitwise:
            return _handle(op(_up(a), _up(b)))
        result = binary(self, a, b, op)
        return _handle(result.data) if result.data.dtype == bool else result

    def unary_op(self, a, op):
        return _handle(op(_up(a))) if _half(a) else unary(self, a, op)

    def ternary_op(self, a, b, c, op):
        if op is np.where or not _half(a, b, c):
            return ternary(self, a, b, c, op)
        return _handle(op(_up(a), _up(b), _up(c)))

    def create_fma(self, a, b, c):
        return _handle(_up(a) * _up(b) + _up(c)) if _half(a, b, c) else fma(self, a, b, c)

    def create_dot(self, a, b, d, *rest):
        return dot(self, _float(a), _float(b), d, *rest)

    def create_rsqrt(self, a):
        return _handle(1 / np.sqrt(_up(a))) if _half(a) else rsqrt(self, a)

    def create_erf(self, a):
        return _handle(_up(erf(self, _float(a)))) if _half(a) else erf(self, a)

    def cast_impl(self, source, target):
        to = target.scalar
        if source.dtype.scalar == BF16 and to != BF16:
            source = _float(source)
            return source if to == tl.float32 else cast(self, source, target)
        if to == BF16 and source.dtype.scalar != BF16:
            return interpreter.TensorHandle(_down(source.data.astype(np.float32)), BF16)
        return cast(self, source, target)

    def create_fp_to_fp(self, source, target, mode):
        truncating = mode == interpreter._ir.ROUNDING_MODE.RTZ
        if _half(source) or (target.scalar == BF16 and not truncating):
            return cast_impl(self, source, target)
        return convert(self, source, target, mode)

    for name, function in list(locals().items()):
        if name not in ("Builder", "bitwise") and hasattr(Builder, name) and callable(function):
            setattr(Builder, name, function)
    if not hasattr(Builder, "get_bf16"):
        Builder.get_bf16 = lambda self, v: interpreter.TensorHandle(
            _down(np.array([v], np.float32)), BF16
        )


def _in_fp32(cls, name: str) -> None:
    """Fixes a reduction or scan of bf16, which the interpreter passes to numpy as raw bits."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def function(self, x, *rest, **options):
        first = x[0] if isinstance(x, tuple) else x
        if first.dtype != BF16:
            return original(self, x, *rest, **options)

        def down(y):
            wide = isinstance(y, tl.tensor) and y.dtype == tl.float32
            return self.to_tensor(_down(y.handle.data), BF16) if wide else y

        result = original(self, self.to_tensor(_up(first.handle), tl.float32), *rest, **options)
        return (
            type(result)(map(down, result)) if isinstance(result, (list, tuple)) else down(result)
        )

    setattr(cls, name, function)


_mend_bf16(interpreter.InterpreterBuilder)
for _cls, _names in (
    (interpreter.ReduceOps, ("sum", "min_max")),
    (interpreter.ScanOps, ("cumsum", "cumprod")),
):
    for _name in _names:
        _in_fp32(_cls, _name)


# ------------------------------------------------------------------------------------------------- libdevice


def _mend_libdevice() -> None:
    from triton.language.extra import libdevice

    def of(function):
        def call(*args, _semantic=None, **options):
            tensors = [interpreter.interpreter_semantic.to_tensor(x, False) for x in args]
            like = max(tensors, key=lambda x: x.handle.data.size)
            y = function(*(_up(x.handle) for x in tensors))
            if like.dtype == BF16:
                return tl.tensor(_handle(y.astype(np.float32)), like.type)
            y = y.astype(like.handle.data.dtype)
            return tl.tensor(interpreter.TensorHandle(y, like.dtype), like.type)

        return call

    functions = {
        "pow": np.power,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "atan2": np.arctan2,
        "acos": np.arccos,
    }
    for name in ("tanh", "sin", "cos", "exp", "log", "log1p", "expm1", "sqrt", "abs", "rint"):
        functions[name] = getattr(np, name)
    fast = {
        f"fast_{name}f": f
        for name, f in functions.items()
        if name in ("tanh", "sin", "cos", "exp", "log", "pow")
    }
    for name, function in (functions | fast).items():
        setattr(libdevice, name, of(function))


_mend_libdevice()


# ----------------------------------------------------------------------------------------------------- speed
#
# Without this, every function call in a kernel searches all of Triton's language for functions to replace,
# and every handle builds a table of dtypes.


def _mend_speed() -> None:
    patch, numpy_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    both = type("Globals", (), {"__globals__": {"tl": tl, "core": tl.core}})
    members = functools.cache(
        lambda package: [(n, x) for n, x in inspect.getmembers(package) if builtin(x)]
    )
    builtin, scalar = tl.core.is_builtin, functools.cache(lambda name, dtype: numpy_dtype(dtype))
    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        members(package)

    def patch_builtin(package, builder, scope):
        for name, member in members(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    def call(self, *args, **kwargs):  # the launch has already replaced everything
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def dtype(x):
        x = x.element_ty if isinstance(x, tl.block_type) else x
        return np.dtype(np.uint64) if isinstance(x, tl.pointer_type) else scalar(x.name, x)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = lambda function: patch(both)
    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = dtype


_mend_speed()


# -------------------------------------------------------------------------- options that the interpreter drops


def _check_launches() -> None:
    """Raises AssertionError for a launch of our kernels without `FUSION`."""
    run = interpreter.InterpretedFunction.run

    @functools.wraps(run)
    def checked(self, *args, **options):
        if self.fn.__module__.startswith("nalanda_kernels"):
            assert options.get("enable_fp_fusion"), f"launch {self.fn.__name__} with **FUSION"
        return run(self, *args, **options)

    interpreter.InterpretedFunction.run = checked


_check_launches()
