"""The Triton kernels go through Triton's own compiler for a GPU, which is stricter than its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import re
import warnings

warnings.simplefilter("ignore")  # Triton announces changes of its next version
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pathsgd.geometry.operations.gpu.conv_kernels import add_kernel, gather_kernel, product_kernel
from pathsgd.geometry.operations.gpu.norm_kernels import norm_adjoint_kernel
from pathsgd.optim.fused.gpu.multi_tensor_kernel import BLOCK, TOGETHER, multi_tensor_kernel
from pathsgd.optim.fused.gpu.triton_chain import ROWS
from pathsgd.optim.fused.gpu.triton_kernels import finish_kernel, layer_kernel
from pathsgd.optim.fused.gpu.triton_rule import OPTIONS
from pathsgd.optim.relative.gpu import kernels as relative
from pathsgd.optim.relative.gpu import spectral_kernels as spectral

INTEGERS = {"next_into_parts", "next_out_parts", "rows", "columns", "rows_each"} | {
    f"{tensor}_{axis}" for tensor in "wg" for axis in ("row", "column")
}
VECTORS = {"inverse_out", "inverse_into", "next_into", "next_out", "row_parts", "column_parts"}


def kind(name, low):
    if name in INTEGERS:
        return "i32"
    if name in VECTORS or name.endswith("_ptr"):
        return f"*{low}" if name in ("w_ptr", "g_ptr", "bias_ptr", "bias_g_ptr") else "*fp32"
    return "fp32"


def compiled(kernel, types, constants, options=None, capability=90):
    types = {**types, **dict.fromkeys(constants, "constexpr")}
    made = triton.compile(
        ASTSource(fn=kernel, signature={n: types[n] for n in kernel.arg_names}, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    assert made.asm["cubin"]
    return made


USUAL = dict(
    LR_ON_DEVICE=False, STEP_ON_DEVICE=False, MOVE=True, METHOD=0, NESTEROV=False, DECAY="all",
    MAXIMIZE=False, QUICK=True, BIAS=True, INTO=True, OUT=True, OUT_ROUNDS=1, P=2, COLUMNS=512, STAGES=3,
)
for low, case in (
    ("fp32", {}),
    ("fp32", dict(METHOD=2, DECAY="none", STAGES=2)),
    ("bf16", dict(METHOD=1, NESTEROV=True)),
    ("fp16", dict(METHOD=2, DECAY="coupled", P=4, QUICK=False, MAXIMIZE=True)),
    ("fp32", dict(METHOD=3, DECAY="live", LR_ON_DEVICE=True, STEP_ON_DEVICE=True, OUT_ROUNDS=3)),
    ("bf16", dict(MOVE=False, BIAS=False, OUT=False, P=1)),
    ("fp32", dict(MOVE=False)),
):
    constants = {**USUAL, **case, "w_column": 1, "g_column": 1}
    states = {0: 0, 1: 1, 2: 1, 3: 2}[constants["METHOD"]]
    constants["ROWS"] = ROWS[states]
    made = compiled(layer_kernel, {n: kind(n, low) for n in layer_kernel.arg_names}, constants, OPTIONS)
    # No product is fused into a sum, where which one it is would depend on the rest of the kernel.
    fused = made.asm["ptx"].count("fma.rn.f32")
    per_thread = constants["ROWS"] * constants["COLUMNS"] // (32 * OPTIONS["num_warps"])
    if constants["METHOD"] == 0:
        assert fused == (per_thread + 1 if constants["MOVE"] else 0), (case, fused)
    # A block is fetched while another is computed: what Adagrad and Adam on paths owe their speed to.
    block = 4 * constants["ROWS"] * constants["COLUMNS"]
    ahead = constants["STAGES"] - 1
    # Weights and gradients of two bytes are copied by four, which needs an alignment that is not told here.
    staged = made.metadata.shared >= ahead * block * (states + (2 if low == "fp32" else 0))
    assert staged or not constants["MOVE"], (case, made.metadata.shared)
# Four entries at a time, if layouts allow it: weights, gradients, state and roots, or their second factor.
for kind, method, tensors in ((0, 0, 2), (0, 3, 4), (1, 1, 3), (1, 3, 4), (2, 2, 3)):
    constants = dict(KIND=kind, METHOD=method, NESTEROV=True, DECAY="live", MAXIMIZE=False, QUICK=True)
    types = {n: "fp32" for n in multi_tensor_kernel.arg_names} | dict(table="*i64", tiles="*i32")
    ptx = compiled(multi_tensor_kernel, types, constants, OPTIONS).asm["ptx"]
    accesses = BLOCK.value // (32 * OPTIONS["num_warps"] * TOGETHER.value)
    loads = len(re.findall(r"ld[.]global\\S*[.]v4[.]b32", ptx))
    assert loads == (tensors + 1) * accesses * (kind < 2), (kind, method, loads)
    assert ptx.count("st.global.v4.b32") == (tensors - 1) * accesses * (kind < 2), (kind, method)
tensors = dict(parts="*fp32", inverse="*fp32", table="*i64", flag="*i32", low="fp32", high="fp32")
compiled(finish_kernel, tensors, dict(P=2, BLOCK=128), OPTIONS)
tensors = {
    **dict(pieces="*i64", partial="*fp64", sums="*fp64", directions="*bf16"),
    **dict.fromkeys(("tiles", "firsts", "numbers"), "*i32"),
    **dict.fromkeys(("factors", "sizes", "rescaling", "rates", "decays", "keeps", "scales"), "*fp32"),
    **dict.fromkeys(("squares", "found", "moved", "other", "catch_up", "shares"), "*fp64"),
    **dict(normalized="*fp16", turns="*i1"),
}
for kernel, constants in (
    (relative.norm_kernel, dict(GRADIENT=False)),
    (relative.norm_kernel, dict(GRADIENT=True)),
    (relative.momentum_kernel, dict(NESTEROV=True)),
    (relative.momentum_kernel, dict(NESTEROV=False)),
    (relative.normalize_kernel, {}),
    (relative.square_kernel, {}),
    (relative.move_kernel, dict(decays=None)),
    (relative.move_kernel, dict(squares=None)),
    (relative.grow_kernel, {}),
    (relative.direction_kernel, {}),
    (relative.adam_kernel, {}),
    (relative.scale_kernel, {}),
    (relative.sum_kernel, dict(AT_ONCE=1024)),
):
    compiled(kernel, {n: tensors.get(n, "fp32") for n in kernel.arg_names}, constants)
tensors = dict(matrices="*i64", places="*i32")
for kernel in (spectral.forward_kernel, spectral.backward_kernel, spectral.finish_kernel):
    compiled(kernel, {n: tensors.get(n, "*fp32") for n in kernel.arg_names}, {})
pointers = ["x", "high", "low", "matrix", "gradient", "parts", "scale", "back", "by_scale", "by_shift"]
pointers = dict.fromkeys([*pointers, "total"], "*fp32")
taps = dict(TAPS_Y=3, TAPS_X=3)
tile = dict(SQUARE=True, ROWS=64, COLUMNS=16)
for kernel, constants in (
    (gather_kernel, dict(taps, CHANNELS_LAST=True, BY_PLACE=True, GAPS=True, LINES=8, ACROSS=64)),
    (product_kernel, dict(EVEN=False, TAPS=1, **tile)),
    (product_kernel, dict(EVEN=True, TAPS=9, m_row=1, **tile)),
    (add_kernel, dict(ENTRIES=512)),
    (norm_adjoint_kernel, dict(CHANNELS=4, PLACES=128)),
):
    compiled(kernel, {n: pointers.get(n, "i32") for n in kernel.arg_names}, constants)
# On tensor cores: three products of four times eight terms, of all columns or of half of them.
types = {n: pointers.get(n, "i32") for n in product_kernel.arg_names}
for capability, name, count in ((80, "mma.sync", 24), (90, "wgmma.mma_async", 12), (100, "tcgen05.mma", 12)):
    made = compiled(product_kernel, types, dict(EVEN=True, TAPS=1, **tile), None, capability)
    assert made.asm["ptx"].count(name + ".") == count, (capability, made.asm["ptx"].count(name + "."))
    assert made.metadata.shared <= 48 << 10
print("compiled")
"""


def test_the_kernels_compile_for_a_gpu(tmp_path):
    """In a process of its own: the tests' process interprets Triton."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = tmp_path / "kernels.py"
    script.write_text(CODE)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "compiled\n", done.stderr[-2000:]
