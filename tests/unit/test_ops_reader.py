"""Reader ops against slow, plain Python."""

import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ctr.ops import reader_ops

MISSING = 1 << 32
TOO_MANY, BAD_LABEL, BAD_INTEGER, BAD_HEX, TOO_FEW, BLANK = 1, 2, 3, 4, 5, 6


def parse_slowly(line, has_label):
    """(label, dense, ids, fault, stripped) of one line, by the rules in criteo_parser.h."""
    refused = lambda fault: (0.0, [0.0] * 13, [0] * 26, fault, False)  # noqa: E731
    fields = line.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
    if fields == [b""]:
        return refused(BLANK)
    label = 0.0
    if has_label:
        if fields[0] not in (b"0", b"1"):
            return refused(BAD_LABEL)
        label = float(fields.pop(0))
        if not fields:
            return refused(TOO_FEW)
    dense, ids = [], []
    for position, field in enumerate(fields[:39]):
        if position < 13:
            if field and not (re.fullmatch(rb"-?[0-9]+", field) and -(1 << 63) <= int(field) < 1 << 63):
                return refused(BAD_INTEGER)
            value = np.float32(int(field or 0))
            dense.append(float(np.copysign(np.log1p(np.abs(value)), value)))
        else:
            if field and not re.fullmatch(rb"[0-9a-fA-F]{1,8}", field):
                return refused(BAD_HEX)
            ids.append(int(field, 16) if field else MISSING)
    if len(fields) > 39:
        return refused(TOO_MANY)
    dense += [0.0] * (13 - len(dense))
    return label, dense, ids + [MISSING] * (26 - len(ids)), 0, len(fields) < 39


GOOD_INTEGER = st.one_of(st.just(b""), st.integers(-3, 5000).map(lambda v: b"%d" % v), st.just(b"-9223372036854775808"))
GOOD_HEX = st.one_of(st.just(b""), st.integers(0, 2**32 - 1).map(lambda v: b"%08x" % v), st.just(b"A0f"))
BAD = st.sampled_from([b"x", b"-", b"1.5", b" 1", b"9223372036854775808", b"123456789", b"0x1"])


@st.composite
def lines(draw):
    fields = [draw(st.sampled_from([b"0", b"1", b"0", b"1", b"2", b"01", b""]))]
    fields += draw(st.lists(GOOD_INTEGER, min_size=13, max_size=13)) + draw(
        st.lists(GOOD_HEX, min_size=26, max_size=27)
    )
    if draw(st.integers(0, 3)) == 0:
        fields[draw(st.integers(1, 39))] = draw(BAD)
    if draw(st.integers(0, 3)) == 0:
        fields = fields[: draw(st.integers(0, 40))]
    return b"\t".join(fields) + draw(st.sampled_from([b"", b"\r"]))


@settings(max_examples=80, deadline=None)
@given(st.lists(lines(), max_size=6), st.booleans())
def test_parser_equals_plain_python(texts, has_label):
    if not has_label:
        texts = [text.partition(b"\t")[2] for text in texts]
    text = reader_ops.text_tensor(b"".join(line + b"\n" for line in texts))
    offsets = reader_ops.split_lines(text, final=True)
    assert len(offsets) == len(texts) + 1
    parsed = reader_ops.parse_criteo(text, offsets[:-1], offsets[1:] - 1, has_label=has_label)
    wanted = [parse_slowly(line, has_label) for line in texts]
    for got, name, position in zip(parsed, parsed._fields, range(5), strict=True):
        expected = np.array([line[position] for line in wanted]).reshape(got.shape)
        if name == "dense":
            np.testing.assert_allclose(got, expected, rtol=3e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(got, expected, err_msg=name)


def random_line(random: np.random.Generator, has_label: bool) -> bytes:
    """A line as in the data set: most fields full, some empty, some shorter; one in three is then damaged."""
    counts = [b"" if random.random() < 0.2 else b"%d" % (int(np.exp(random.normal(3, 4))) - 3) for _ in range(13)]
    hexes = [
        b"" if random.random() < 0.2 else b"%0*x" % (8 - (random.random() < 0.1), int(random.integers(2**28)))
        for _ in range(26)
    ]
    fields = [b"%d" % random.integers(2)] * has_label + counts + hexes
    if random.random() < 0.1:
        fields = fields[: random.integers(1, len(fields) + 1)]
    line = bytearray(b"\t".join(fields))
    damage = random.integers(9)
    place = int(random.integers(len(line))) if line else 0
    if damage == 0 and line:
        line[place] = int(random.integers(256))
    elif damage == 1:
        line[place:place] = bytes(random.choice(np.frombuffer(b"\t-+0g \r\x00\x89\xb0", np.uint8), random.integers(4)))
    elif damage == 2:
        del line[place : place + random.integers(12)]
    return bytes(line).replace(b"\n", b"?") + (b"\r" if random.random() < 0.2 else b"")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 3))
def test_random_lines_of_several_texts_equal_plain_python(seed, has_label, text_count):
    random = np.random.default_rng(seed)
    texts = [[random_line(random, has_label) for _ in range(30)] for _ in range(text_count)]
    tensors = [reader_ops.text_tensor(b"\n".join(lines) + b"\n") for lines in texts]
    starts = np.cumsum([0, *(len(tensor.numpy()) for tensor in tensors)])
    offsets = [reader_ops.split_lines(tensor, final=False) + at for tensor, at in zip(tensors, starts, strict=False)]
    begins, ends = np.concatenate([o[:-1] for o in offsets]), np.concatenate([o[1:] - 1 for o in offsets])
    order = random.permutation(len(begins))
    parsed = reader_ops.parse_criteo(tensors, begins[order], ends[order], has_label=has_label)
    every = sum(texts, [])
    wanted = [parse_slowly(every[i], has_label) for i in order]
    for got, name, position in zip(parsed, parsed._fields, range(5), strict=True):
        expected = np.array([line[position] for line in wanted]).reshape(got.shape)
        if name == "dense":
            np.testing.assert_allclose(got, expected, rtol=3e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(got, expected, err_msg=name)
    assert 0 < np.count_nonzero(parsed.faults) < len(order)


def test_a_line_in_two_texts_is_refused():
    texts = [reader_ops.text_tensor(b"ab"), reader_ops.text_tensor(b"cd")]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"line 0 is \[1, 3\), but one text ends at 2"):
        reader_ops.parse_criteo(texts, np.array([1]), np.array([3]), has_label=True)


def test_lines_may_be_taken_in_any_order():
    """A shuffled batch parses the same lines: many of them, so that several threads take part."""
    generator = np.random.default_rng(0)
    texts = [
        b"\t".join([b"%d" % (i % 2), *(b"%d" % v for v in generator.integers(0, 99, 13)), *(b"%08x" % i,) * 26])
        for i in range(3000)
    ]
    text = reader_ops.text_tensor(b"\n".join(texts) + b"\n")
    offsets = reader_ops.split_lines(text, final=False)
    order = generator.permutation(3000)
    parsed = reader_ops.parse_criteo(text, offsets[order], offsets[order + 1] - 1, has_label=True)
    np.testing.assert_array_equal(parsed.ids, np.repeat(order[:, None], 26, axis=1))
    np.testing.assert_array_equal(parsed.labels, order % 2)
    assert not parsed.faults.any()
    assert not parsed.stripped.any()


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=40).map(lambda b: b.replace(b"\x00", b"\n")), st.booleans())
def test_split_lines(text, final):
    offsets = reader_ops.split_lines(text, final=final)
    whole = text.split(b"\n")
    rest = whole.pop()
    wanted = [line + b"\n" for line in whole] + ([rest] if final and rest else [])
    assert [text[a:b] for a, b in itertools.pairwise(offsets)] == wanted
    assert text[offsets[-1] :] == (b"" if final else rest)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 6)])
def test_lines_outside_the_text_are_refused(begin, end):
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"line 1 is .*outside the text of 5 bytes"):
        reader_ops.parse_criteo(b"12345", np.array([0, begin]), np.array([1, end]), has_label=True)


def hash_slowly(text, seed):
    """hash.h HashBytes >> 1."""
    mask = (1 << 64) - 1

    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    value = 0xCBF29CE484222325 ^ mix(seed & mask)
    for byte in text:
        value = (value ^ byte) * 0x100000001B3 & mask
    return mix(value) >> 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=12), max_size=8), st.sampled_from([0, 1, -1]))
def test_hash_strings_equals_plain_python(texts, seed):
    offsets = np.cumsum([0, *map(len, texts)])
    ids = reader_ops.hash_strings(b"".join(texts), offsets, seed)
    assert ids.tolist() == [hash_slowly(text, seed) for text in texts]
    assert np.all(ids >= 0)


@pytest.mark.parametrize("offsets", [[], [0, 3, 2], [-1, 2], [0, 6]])
def test_bad_offsets_are_refused(offsets):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        reader_ops.hash_strings(b"12345", np.array(offsets, np.int64))
