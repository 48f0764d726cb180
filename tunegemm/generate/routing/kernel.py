"""The Triton kernels around products of groups: a router's choice to rows in groups, gates, rows to tokens;
and the product itself of few rows, which is bound by how many multiprocessors read the weights.

Numbers of experts may be int32 or int64: read are their lower 32 bits, `step` integers apart. Strides and
lengths come in units of 16 bytes, which lets loads be as wide.
"""

import triton
import triton.language as tl


@triton.jit
def numbers(index, step, first, total, count, length: tl.constexpr):
    """`length` experts from a position on; `count` for those that are not here, more behind the last."""
    positions = first + tl.arange(0, length)
    found = tl.load(index + positions * step, mask=positions < total, other=0)
    found = tl.where((found >= 0) & (found < count), found, count)
    return tl.where(positions < total, found, count + 1), positions


@triton.jit
def route(
    index, x, place, ends, rows, step, total, chosen, count, units, x_units,
    own_rows: tl.constexpr, others: tl.constexpr, experts: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """Where each of `total` choices lies when all are sorted by expert, where experts end, and x's rows so.

    A place is counted: of smaller experts and, of the same one, of those before. So it needs neither a sort
    nor a second launch, and is the same at each call. The blocks behind those of rows count the ends.
    index: (tokens, chosen). x, rows: 64-bit words, `x_units` apart and `units` long. place: int32 (total).
    """
    program = tl.program_id(0)
    blocks = (total + own_rows - 1) // own_rows
    if program < blocks:
        own, mine = numbers(index, step, program * own_rows, total, count, own_rows)
        before = tl.zeros((own_rows, others), tl.int32)
        for first in range(0, total, others):
            found, positions = numbers(index, step, first, total, count, others)
            is_same = (found[None, :] == own[:, None]) & (positions[None, :] < mine[:, None])
            before += ((found[None, :] < own[:, None]) | is_same).to(tl.int32)
        rank = tl.sum(before, axis=1)
        tl.store(place + mine, rank, mask=mine < total)
        source = x + ((mine // chosen).to(tl.int64) * x_units * 2)[:, None]
        target = rows + (rank.to(tl.int64) * units * 2)[:, None]
        for word in range(0, units * 2, words):
            columns = (word + tl.arange(0, words))[None, :]
            mask = (mine < total)[:, None] & (columns < units * 2)
            tl.store(target + columns, tl.load(source + columns, mask=mask, other=0), mask=mask)
    else:
        expert = (program - blocks) * experts + tl.arange(0, experts)
        up_to = tl.zeros((experts, others), tl.int32)
        for first in range(0, total, others):
            found, _ = numbers(index, step, first, total, count, others)
            up_to += (found[None, :] <= expert[:, None]).to(tl.int32)
        tl.store(ends + expert, tl.sum(up_to, axis=1), mask=expert < count)


@triton.jit
def tally(index, counts, step, total, count, own_rows: tl.constexpr, bins: tl.constexpr):
    """How many of a block's `own_rows` choices are each expert's: of many choices the first of two launches.

    counts: int32 (blocks, bins); bins: more than `count` + 1.
    """
    program = tl.program_id(0)
    own, _ = numbers(index, step, program * own_rows, total, count, own_rows)
    tl.store(counts + program * bins + tl.arange(0, bins), tl.histogram(own, bins))


@triton.jit
def spread(
    index, x, counts, place, ends, rows, step, total, chosen, count, units, x_units,
    own_rows: tl.constexpr, bins: tl.constexpr, others: tl.constexpr, words: tl.constexpr,
    together: tl.constexpr,
):  # fmt: skip
    """What `route` does, by what `tally` counted: a block compares its choices with no others."""
    program = tl.program_id(0)
    blocks = (total + own_rows - 1) // own_rows
    expert = tl.arange(0, bins)
    everywhere = tl.zeros((bins,), tl.int32)
    before = tl.zeros((bins,), tl.int32)
    for first in range(0, blocks, together):
        block = first + tl.arange(0, together)
        found = tl.load(
            counts + block[:, None] * bins + expert[None, :], mask=(block < blocks)[:, None], other=0
        )
        everywhere += tl.sum(found, axis=0)
        before += tl.sum(tl.where(block[:, None] < program, found, 0), axis=0)
    end = tl.cumsum(everywhere, axis=0)
    if program == 0:
        tl.store(ends + expert, end, mask=expert < count)
    own, mine = numbers(index, step, program * own_rows, total, count, own_rows)
    same = tl.zeros((own_rows, others), tl.int32)
    for first in range(program * own_rows, (program + 1) * own_rows, others):
        found, positions = numbers(index, step, first, total, count, others)
        same += ((found[None, :] == own[:, None]) & (positions[None, :] < mine[:, None])).to(tl.int32)
    rank = tl.gather(end - everywhere + before, own, axis=0) + tl.sum(same, axis=1)
    tl.store(place + mine, rank, mask=mine < total)
    source = x + ((mine // chosen).to(tl.int64) * x_units * 2)[:, None]
    target = rows + (rank.to(tl.int64) * units * 2)[:, None]
    for word in range(0, units * 2, words):
        columns = (word + tl.arange(0, words))[None, :]
        mask = (mine < total)[:, None] & (columns < units * 2)
        tl.store(target + columns, tl.load(source + columns, mask=mask, other=0), mask=mask)


@triton.jit
def combine(
    rows, place, ends, weights, out, step, count, chosen, units, blocks, weights_stride,
    columns: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    """Each token's rows, weighted and added up in fp32, in the order of its choices.

    What no expert here was chosen for lies behind the last group, and adds nothing. place: (tokens, chosen),
    its integers `step` apart as `numbers` has it. rows, out: `units` long. blocks: those of a token.
    """
    program = tl.program_id(0)
    token, column = program // blocks, (program % blocks) * columns + tl.arange(0, columns)
    is_inside = column < units * 8
    used = tl.load(ends + count - 1)
    sums = tl.zeros((columns,), tl.float32)
    own_weights = weights + token.to(tl.int64) * weights_stride
    for first in range(0, chosen, together):
        for number in tl.static_range(together):
            choice = first + number
            at = tl.load(place + (token * chosen + choice) * step, mask=choice < chosen, other=used)
            weight = tl.load(own_weights + choice, mask=choice < chosen, other=0.0)
            weight = tl.where(at < used, weight.to(tl.float32), 0.0)
            row = rows + at.to(tl.int64) * units * 8
            sums += weight * tl.load(row + column, mask=is_inside & (at < used), other=0.0).to(tl.float32)
    target = out + token.to(tl.int64) * units * 8 + column
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def gate_of(gated, up, slope, limit, offset):
    """(up + offset) * gate * sigmoid(slope * gate), gate limited above, up on both sides.

    slope, limit, offset: the bits of fp32 numbers.
    """
    slope, limit = slope.to(tl.float32, bitcast=True), limit.to(tl.float32, bitcast=True)
    # A NaN stays one, as torch.clamp leaves it.
    gated = tl.minimum(gated, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    return (up + offset.to(tl.float32, bitcast=True)) * gated / (1.0 + tl.exp(-slope * gated))


@triton.jit
def gate(both, out, units, blocks, slope, limit, offset, columns: tl.constexpr, alternate: tl.constexpr):
    """`gate_of` rows of gate and up, `units` each. alternate: whether gate and up take turns, else they are
    halves. blocks: those of a row.
    """
    program = tl.program_id(0)
    row, first = (program // blocks).to(tl.int64), (program % blocks) * columns
    column = first + tl.arange(0, columns)
    source = both + row * units * 16
    if alternate:
        pairs = first * 2 + tl.arange(0, columns * 2)
        found = tl.load(source + pairs, mask=pairs < units * 16, other=0.0)
        gated, up = tl.split(found.reshape(columns, 2))
    else:
        gated = tl.load(source + column, mask=column < units * 8, other=0.0)
        up = tl.load(source + units * 8 + column, mask=column < units * 8, other=0.0)
    result = gate_of(gated.to(tl.float32), up.to(tl.float32), slope, limit, offset)
    tl.store(out + row * units * 8 + column, result.to(out.dtype.element_ty), mask=column < units * 8)


@triton.jit
def few(
    rows, weights, ends, bias, out, total, count, n, units, row_units, group_units, line_units, has_bias,
    bias_stride, turns, apart,
    lines: tl.constexpr, length: tl.constexpr, groups: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Each of `total` rows by its group's weights, their k contiguous: a block has `lines` columns of a row.

    Rows behind the last group are left alone. Blocks of a column's rows are neighbours, as they may read the
    same weights. rows, weights: `units` long, in units of 16 bytes as all strides but the bias'. n: columns
    of out. Gated: column c is silu(gate) * up, of lines c * `turns` and c * `turns` + `apart`.
    """
    program = tl.program_id(0)
    row, first = program % total, program // total * lines
    before = tl.zeros((groups,), tl.int32)
    for start in range(0, count, groups):
        number = start + tl.arange(0, groups)
        before += tl.load(ends + number, mask=number < count, other=row + 1) <= row
    group = tl.sum(before.to(tl.int32), axis=0)
    if group < count:
        column = first + tl.arange(0, lines)
        is_column = column < n
        line = column * turns
        source = weights + group.to(tl.int64) * group_units * 8 + line.to(tl.int64)[:, None] * line_units * 8
        target = rows + row.to(tl.int64) * row_units * 8
        sums = tl.zeros((lines, length), tl.float32)
        ups = tl.zeros((lines, length), tl.float32)
        for start in range(0, units * 8, length):
            at = start + tl.arange(0, length)
            is_inside = at < units * 8
            mask = is_column[:, None] & is_inside[None, :]
            x = tl.load(target + at, mask=is_inside, other=0.0).to(tl.float32)[None, :]
            each = source + at[None, :]
            found = tl.load(each, mask=mask, other=0.0, eviction_policy="evict_first")
            if gated:
                other = each + apart.to(tl.int64) * line_units * 8
                ups += tl.load(other, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * x
            sums += found.to(tl.float32) * x
        result = tl.sum(sums, axis=1)
        with_bias = is_column & (has_bias != 0)
        of_group = bias + group.to(tl.int64) * bias_stride + line
        result += tl.load(of_group, mask=with_bias, other=0.0).to(tl.float32)
        if gated:
            up = tl.sum(ups, axis=1)
            up += tl.load(of_group + apart, mask=with_bias, other=0.0).to(tl.float32)
            result = result / (1.0 + tl.exp(-result)) * up
        tl.store(out + row.to(tl.int64) * n + column, result.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def few_up(
    index, x, weights, bias, out, step, total, chosen, count, n, units, x_units, group_units, line_units,
    has_bias, bias_stride, turns, apart, slope, limit, offset,
    lines: tl.constexpr, length: tl.constexpr,
):  # fmt: skip
    """Gate and up of each of `total` choices, whose rows stay where they are: out has a row for each choice.

    A block has `lines` columns of a row. Rows of choices of no expert here are left alone. index, step: as
    `numbers` has them. x, weights: `units` long, in units of 16 bytes as all strides but the bias'. Column c
    is `gate_of` lines c * `turns` and c * `turns` + `apart`.
    """
    program = tl.program_id(0)
    row, first = program % total, program // total * lines
    group = tl.load(index + row * step)
    if (group >= 0) & (group < count):
        column = first + tl.arange(0, lines)
        is_column = column < n
        line = column * turns
        source = weights + group.to(tl.int64) * group_units * 8 + line.to(tl.int64)[:, None] * line_units * 8
        target = x + (row // chosen).to(tl.int64) * x_units * 8
        gates = tl.zeros((lines, length), tl.float32)
        ups = tl.zeros((lines, length), tl.float32)
        for start in range(0, units * 8, length):
            at = start + tl.arange(0, length)
            is_inside = at < units * 8
            mask = is_column[:, None] & is_inside[None, :]
            each = source + at[None, :]
            other = each + apart.to(tl.int64) * line_units * 8
            found = tl.load(each, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            second = tl.load(other, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            values = tl.load(target + at, mask=is_inside, other=0.0).to(tl.float32)[None, :]
            gates += found * values
            ups += second * values
        with_bias = is_column & (has_bias != 0)
        of_group = bias + group.to(tl.int64) * bias_stride + line
        gated = tl.sum(gates, axis=1) + tl.load(of_group, mask=with_bias, other=0.0).to(tl.float32)
        up = tl.sum(ups, axis=1) + tl.load(of_group + apart, mask=with_bias, other=0.0).to(tl.float32)
        result = gate_of(gated, up, slope, limit, offset)
        tl.store(out + row.to(tl.int64) * n + column, result.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def few_down(
    index, rows, weights, bias, factors, out, step, tokens, chosen, count, n, units, group_units, line_units,
    has_bias, bias_stride, factors_stride,
    lines: tl.constexpr, length: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    """Each token's rows by their experts' weights, weighted and added up: a block has `lines` columns of one.

    rows: (tokens * chosen, K), as `few_up` leaves them, K `units` long. Choices of no expert here add
    nothing. together: choices whose weights are loaded at once.
    """
    program = tl.program_id(0)
    token, first = program % tokens, program // tokens * lines
    place = tl.arange(0, together * lines)
    column = first + place % lines
    result = tl.zeros((together * lines,), tl.float32)
    own_factors = factors + token.to(tl.int64) * factors_stride
    for begin in range(0, chosen, together):
        choice = begin + place // lines
        group = tl.load(index + (token * chosen + choice) * step, mask=choice < chosen, other=-1)
        is_here = (group >= 0) & (group < count) & (column < n)
        factor = tl.load(own_factors + choice, mask=is_here, other=0.0).to(tl.float32)
        source = weights + group.to(tl.int64) * group_units * 8 + column.to(tl.int64) * line_units * 8
        target = rows + (token * chosen + choice).to(tl.int64) * units * 8
        sums = tl.zeros((together * lines, length), tl.float32)
        for start in range(0, units * 8, length):
            at = start + tl.arange(0, length)
            mask = is_here[:, None] & (at < units * 8)[None, :]
            found = tl.load(
                source[:, None] + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
            )
            values = tl.load(target[:, None] + at[None, :], mask=mask, other=0.0)
            sums += found.to(tl.float32) * values.to(tl.float32)
        added = tl.load(
            bias + group.to(tl.int64) * bias_stride + column, mask=is_here & (has_bias != 0), other=0.0
        )
        result += tl.where(is_here, factor * (tl.sum(sums, axis=1) + added.to(tl.float32)), 0.0)
    total = tl.sum(result.reshape(together, lines), axis=0)
    column = first + tl.arange(0, lines)
    tl.store(out + token.to(tl.int64) * n + column, total.to(out.dtype.element_ty), mask=column < n)
