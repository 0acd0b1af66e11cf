"""The two kernels of a chain's step, around the formula of triton_rule.py.

``layer_kernel``: a program walks down some rows of a strip of columns, updates the weights, sums their powers
over the columns in registers, and writes these sums and each block's row sums to places of its own. Nothing
is added atomically, so a step gives the same bits every time. ``finish_kernel`` adds up the parts.
"""

import triton
import triton.language as tl

from pathsgd.optim.fused.gpu.triton_rule import find_rates, load_weights, store_weights, update

OUT_AT_ONCE: tl.constexpr = tl.constexpr(64)
"""Parts of gamma_out that are loaded together."""


@triton.jit
def _power(w, P: tl.constexpr):
    if P == 1:
        return tl.abs(w)
    if P == 2:
        return w * w
    return (w * w) * (w * w)


@triton.jit
def _read(value, pointer, ON_DEVICE: tl.constexpr):
    """A number passed by value, or read from the device."""
    if ON_DEVICE:
        value = tl.load(pointer).to(tl.float32)
    return value


@triton.jit
def _sum_parts(parts, start, count, length, at, mask, AT_ONCE: tl.constexpr):
    """The sum of AT_ONCE parts of a vector, from part ``start`` on."""
    r = start + tl.arange(0, AT_ONCE)
    return tl.sum(
        tl.load(parts + r[:, None] * length + at[None, :], (r < count)[:, None] & mask[None, :], 0.0), 0
    )


@triton.jit
def _sum_all_parts(parts, count, length, at, mask, AT_ONCE: tl.constexpr):
    """The sum of all parts of a vector, several loads in flight."""
    total = tl.zeros(at.shape, tl.float32)
    for start in range(0, count, AT_ONCE):
        total += _sum_parts(parts, start, count, length, at, mask, AT_ONCE)
    return total


@triton.jit
def layer_kernel(
    w_ptr, g_ptr, m_ptr, v_ptr, bias_ptr, bias_g_ptr, bias_m_ptr, bias_v_ptr, inverse_out, inverse_into,
    next_into, next_into_parts, next_out, next_out_parts, row_parts, column_parts,
    rows, columns, rows_each, w_row, w_column, g_row, g_column,
    lr_value, lr_ptr, bias_lr_value, bias_lr_ptr, step_value, step_ptr, bias_step_value, bias_step_ptr,
    weight_decay, bias_weight_decay, momentum, lr_decay, first, rest_first, log_first,
    second, rest_second, log_second, eps, root_factor, bias_root_factor, into_factor, bias_factor, out_factor,
    LR_ON_DEVICE: tl.constexpr, STEP_ON_DEVICE: tl.constexpr, MOVE: tl.constexpr, METHOD: tl.constexpr,
    NESTEROV: tl.constexpr, DECAY: tl.constexpr, MAXIMIZE: tl.constexpr, QUICK: tl.constexpr,
    BIAS: tl.constexpr, INTO: tl.constexpr, OUT: tl.constexpr, OUT_ROUNDS: tl.constexpr,
    P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    strip, share = tl.program_id(0), tl.program_id(1)
    n = strip * COLUMNS + tl.arange(0, COLUMNS)
    n_mask = n < columns
    if MOVE:
        lr = _read(lr_value, lr_ptr, LR_ON_DEVICE)
        step = _read(step_value, step_ptr, STEP_ON_DEVICE)
        rate, correction, shrink = find_rates(lr, step, weight_decay, lr_decay, log_first, log_second, METHOD)
        bias_lr = _read(bias_lr_value, bias_lr_ptr, LR_ON_DEVICE)
        bias_step = _read(bias_step_value, bias_step_ptr, STEP_ON_DEVICE)
        bias_rate, bias_correction, bias_shrink = find_rates(
            bias_lr, bias_step, bias_weight_decay, lr_decay, log_first, log_second, METHOD
        )
        tail = tl.load(inverse_into + n, n_mask, 0.0)
    if INTO:
        into = _sum_all_parts(next_into, next_into_parts, columns, n, n_mask, 8)
    if OUT:
        column_sums = tl.zeros((COLUMNS,), tl.float32)
    first_row = share * rows_each
    last_row = tl.minimum(first_row + rows_each, rows)
    bias_end = tl.where(strip == 0, last_row, 0)  # biases are left to the first strip
    # Pipelined: while a block is computed, the next ones are copied to shared memory. Blocks are different
    # rows, so nothing is copied that is still to be written.
    for start in tl.range(first_row, last_row, ROWS, num_stages=STAGES):
        r = start + tl.arange(0, ROWS)
        r_mask = r < last_row
        mask = r_mask[:, None] & n_mask[None, :]
        bias_mask = r < bias_end
        w_at = w_ptr + r[:, None].to(tl.int64) * w_row + n[None, :].to(tl.int64) * w_column
        # All loads of a block are issued before any is used, so that their latencies overlap.
        if MOVE:
            state_at = r[:, None].to(tl.int64) * columns + n[None, :]
            g_at = g_ptr + r[:, None].to(tl.int64) * g_row + n[None, :].to(tl.int64) * g_column
            w, g, m, v = load_weights(w_at, g_at, m_ptr + state_at, v_ptr + state_at, mask, METHOD)
            head = tl.load(inverse_out + r, r_mask, 0.0)
            if BIAS:
                bias, bias_g, bias_m, bias_v = load_weights(
                    bias_ptr + r, bias_g_ptr + r, bias_m_ptr + r, bias_v_ptr + r, bias_mask, METHOD
                )
        else:
            w = tl.load(w_at, mask, 0.0).to(tl.float32)
            if BIAS:
                bias = tl.load(bias_ptr + r, bias_mask, 0.0).to(tl.float32)
        if OUT:
            # Unrolled: Triton does not pipeline a loop that holds another.
            out = _sum_parts(next_out, 0, next_out_parts, rows, r, r_mask, OUT_AT_ONCE)
            for k in tl.static_range(1, OUT_ROUNDS):
                out += _sum_parts(next_out, k * OUT_AT_ONCE, next_out_parts, rows, r, r_mask, OUT_AT_ONCE)
        if MOVE:
            w, m, v = update(
                w.to(tl.float32), g, m, v, (head * root_factor)[:, None] * tail[None, :], rate, correction,
                shrink, weight_decay, momentum, first, rest_first, second, rest_second, eps, METHOD,
                NESTEROV, DECAY, MAXIMIZE, QUICK,
            )  # fmt: skip
            w = store_weights(w_at, m_ptr + state_at, v_ptr + state_at, mask, w, m, v, METHOD)
            if BIAS:
                bias, bias_m, bias_v = update(
                    bias.to(tl.float32), bias_g, bias_m, bias_v, head * bias_root_factor, bias_rate,
                    bias_correction, bias_shrink, bias_weight_decay, momentum, first, rest_first, second,
                    rest_second, eps, METHOD, NESTEROV, DECAY, MAXIMIZE, QUICK,
                )  # fmt: skip
                bias = store_weights(
                    bias_ptr + r, bias_m_ptr + r, bias_v_ptr + r, bias_mask, bias, bias_m, bias_v, METHOD
                )
        edges = tl.where(mask, _power(w, P), 0.0)
        if INTO:
            tl.store(row_parts + strip * rows + r, tl.sum(edges * into[None, :], 1) * into_factor, r_mask)
            if BIAS:
                # One part more than there are strips.
                tl.store(row_parts + tl.num_programs(0) * rows + r, _power(bias * bias_factor, P), bias_mask)
        if OUT:
            column_sums += tl.sum(edges * out[:, None], 0)
    if OUT:
        tl.store(column_parts + share * columns + n, column_sums * out_factor, n_mask)


@triton.jit
def finish_kernel(parts, inverse, table, flag, low, high, P: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the parts of one block of one vector, takes its inverse root, and checks its range."""
    row = table + tl.program_id(0) * 5
    offset, count, length = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    place, start = tl.load(row + 3), tl.load(row + 4)
    at = start + tl.arange(0, BLOCK)
    mask = at < length
    total = _sum_all_parts(parts + offset, count, length, at, mask, 64)
    root = total
    if P == 2:
        root = tl.sqrt_rn(total)
    if P == 4:
        root = tl.sqrt_rn(tl.sqrt_rn(total))
    before = tl.load(inverse + place + at, mask, 0.0)
    tl.store(
        inverse + place + at, tl.where(total > 0, tl.div_rn(1.0, tl.where(total > 0, root, 1.0)), 0.0), mask
    )
    # Not in range, or zero where it was not.
    lost = (total < low) & ((total != 0) | (before != 0))
    bad = mask & (lost | (total > high) | (total != total))
    worst = tl.max(bad.to(tl.int32), 0)
    tl.atomic_max(flag, worst, mask=worst > 0)
