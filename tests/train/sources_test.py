"""Files of documents and of tokens: what is in them, and where they are damaged."""

import json
import struct

import numpy as np
import pytest
from array_record.python import array_record_module

from deepinit.errors import ConfigError
from deepinit.signal.watch import unigram_entropy
from deepinit.train import data, prepare, sources, tokenizers
from deepinit.train.config import DataConfig, load

DOCUMENTS = [f"document {i}: {'x' * (7 * i % 50)} é".encode() for i in range(40)]


def jsonl(path, documents=DOCUMENTS):
    path.write_text("".join(json.dumps({"text": d.decode()}) + "\n" for d in documents))
    return path


def array_record(path, documents=DOCUMENTS):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for d in documents:
        writer.write(d)
    writer.close()
    return path


def read(path, start=0, **options):
    reading = sources.Reading(**options)
    return [text for _, text in sources.documents(path, reading, start)], reading


@pytest.mark.parametrize("make", [jsonl, array_record])
def test_documents_and_places(make, tmp_path):
    path = make(tmp_path / {jsonl: "a.jsonl", array_record: "a.arrayrecord"}[make])
    pairs = list(sources.documents(path, sources.Reading()))
    assert [text for _, text in pairs] == DOCUMENTS
    for i in (0, 17, 39):  # every place is where the rest begins
        assert read(path, pairs[i][0])[0] == DOCUMENTS[i + 1 :]


def test_damaged_lines(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", DOCUMENTS[:2])
    good = path.read_bytes()
    path.write_bytes(good + b'{"text": "cut of\n{"other": 1}\n[1]\n' + good)
    with pytest.raises(ConfigError, match=f"{path}, byte {len(good)}: not a JSON object"):
        read(path)
    documents, reading = read(path, on_corrupt="skip")
    assert documents == DOCUMENTS[:2] * 2
    assert reading.skipped == {str(path): 3}
    with pytest.raises(ConfigError, match=r"no field 'body'; data\.text_field names it"):
        read(path, text_field="body")


def test_a_truncated_array_record(tmp_path):
    path = array_record(tmp_path / "a.arrayrecord")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=f"{path}, its end: not a whole ArrayRecord"):
        read(path)


def test_nanogpts_tokens(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    assert (sources.tokens(path).tokens == np.arange(1000)).all()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"{path}, byte 1999: the file ends inside a token of 2 bytes"):
        sources.tokens(path)


@pytest.mark.parametrize(("magic", "kind"), [(20240520, "<u2"), (20240801, "<u4")])
def test_llmcs_tokens(tmp_path, magic, kind):
    path = tmp_path / "train.bin"
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, 500
    path.write_bytes(header.tobytes() + np.arange(500).astype(kind).tobytes())
    got = sources.tokens(path)
    assert (got.tokens == np.arange(500)).all()
    assert got.byte(3) == 1024 + 3 * np.dtype(kind).itemsize
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="the header says 500 tokens"):
        sources.tokens(path)


def megatron(path, documents, kind="<u2", code=8):
    np.concatenate(documents).astype(kind).tofile(path)
    sizes = np.asarray([len(d) for d in documents], "<i4")
    starts = ((np.cumsum(sizes) - sizes) * np.dtype(kind).itemsize).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    bounds = np.arange(len(sizes) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(head + sizes.tobytes() + starts.tobytes() + bounds.tobytes())
    return path


def test_megatrons_tokens(tmp_path):
    documents = [np.arange(10), np.arange(5), np.arange(20)]
    path = megatron(tmp_path / "m.bin", documents, "<i4", 4)
    got = sources.tokens(path)
    assert (got.tokens == np.concatenate(documents)).all()
    assert got.bounds.tolist() == [0, 10, 15]
    whole, idx = path.read_bytes(), path.with_suffix(".idx").read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(ConfigError, match=f"{path}, byte 136: 136 bytes, the index says 140"):
        sources.tokens(path)
    path.with_suffix(".idx").write_bytes(idx[:-9])
    with pytest.raises(ConfigError, match=rf"m.idx, byte {len(idx) - 9}: cut off: 3 sequences and 4 documents"):
        sources.tokens(path)
    path.with_suffix(".idx").write_bytes(b"X" + idx[1:])
    with pytest.raises(ConfigError, match=r"m.idx, byte 0: not an index of Megatron"):
        sources.tokens(path)


def test_a_folder_is_all_its_files(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("z.txt", "a/b/c.txt", ".hidden"):
        (tmp_path / name).write_text(name)
    assert [p.name for p in sources.find([str(tmp_path)])] == ["c.txt", "z.txt"]


# ---------------------------------------------------------------------------------------------- windows of them

SIZES = {"batch_size": 4, "eval_batch_size": 4, "eval_batches": 1}


def test_files_of_tokens_are_one_text(tmp_path):
    for i in range(3):
        np.arange(100 * i, 100 * i + 100, dtype="<u2").tofile(tmp_path / f"{i}.bin")
    text = data.read((str(tmp_path / "*.bin"),))
    assert len(text.tokens) == 300
    assert text.tokens[95:205].tolist() == list(range(95, 205))
    loaded = data.load(DataConfig((str(tmp_path),), seq_len=9, eval_fraction=0.1), **SIZES, vocab_size=300)
    steps = loaded.num_train // 4
    seen = [t for step in range(steps) for row in loaded.train[step]["tokens"] for t in row.tolist()]
    assert len(set(seen)) == len(seen) == steps * 40


def test_a_token_beyond_the_vocabulary_is_named(tmp_path):
    tokens = np.zeros(400, "<u2")
    tokens[333] = 77
    tokens.tofile(tmp_path / "a.bin")
    loaded = data.load(DataConfig((str(tmp_path / "a.bin"),), 9, eval_fraction=0.1), **SIZES, vocab_size=77)
    with pytest.raises(ConfigError, match=r"a.bin, byte 666: token 77 is not below model.vocab_size 77"):
        list(map(loaded.train.__getitem__, range(20)))


@pytest.mark.parametrize("kind", ["bounds", "eos"])
def test_a_document_mask_stops_at_documents(tmp_path, kind):
    documents = [np.full(n, i + 1) for i, n in enumerate([5, 9, 3, 30, 7, 50] * 4)]
    if kind == "bounds":
        path = megatron(tmp_path / "a.bin", documents)
        config = DataConfig((str(path),), seq_len=9, eval_fraction=0.1, document_mask=True)
    else:
        path = tmp_path / "a.bin"
        np.concatenate([np.append(d[1:], 0) for d in documents]).astype("<u2").tofile(path)
        config = DataConfig((str(path),), seq_len=9, eval_fraction=0.1, document_mask=True, eos=0)
    loaded = data.load(config, **SIZES)
    assert loaded.train.samples[0]["tokens"].shape == (10,)
    owner = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    for i in range(loaded.num_train):
        sample = loaded.train.samples[i]
        start = int(sample["id"]) * 10
        own = owner[start : start + 10]
        assert sample["segments"][: len(own)].tolist() == (own - own[0] + 1).tolist()
        same = own[1:] == own[:-1]
        assert sample["weights"][: len(same)].tolist() == same.astype(float).tolist()


def test_a_mixture_takes_its_shares(tmp_path):
    for name, value in (("a", 1), ("b", 2)):
        np.full(4000, value, "<u2").tofile(tmp_path / f"{name}.bin")
    mixture = {str(tmp_path / "a.bin"): 0.75, str(tmp_path / "b.bin"): 0.25}
    config = load().replace(data__mixture=mixture, data__seq_len=9)
    loaded = data.load(config.data, **SIZES)
    batches = [loaded.train[step] for step in range(50)]
    share = np.mean([b["tokens"][:, 0] == 1 for b in batches])
    assert share == pytest.approx(0.75, abs=0.01)
    ids = np.concatenate([b["id"] for b in batches])
    assert len(set(ids.tolist())) == 200
    assert {int(i) >> 48 for i in ids} == {0, 1}
    assert unigram_entropy(loaded.text.tokens) == pytest.approx(np.log(2))  # of the tokens of both, as many of each


def test_text_and_tokens_are_not_mixed_in_silence(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    np.zeros(10, "<u2").tofile(tmp_path / "b.bin")
    with pytest.raises(ConfigError, match=r"are text and tokens; data.mixture takes both"):
        data.read((str(tmp_path),))


# ---------------------------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tokenizer.json trained here on our documents."""
    t = pytest.importorskip("tokenizers", reason="of the extra hf")
    made = t.Tokenizer(t.models.BPE(unk_token=None))
    made.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = t.decoders.ByteLevel()
    alphabet = t.pre_tokenizers.ByteLevel.alphabet()
    trainer = t.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([d.decode() for d in DOCUMENTS], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path, made


def test_a_hugging_face_tokenizer(trained):
    path, made = trained
    got = tokenizers.load(str(path))
    assert got.vocab_size == made.get_vocab_size() <= 300
    assert got.eos == 0
    tokens = got.document(DOCUMENTS[3])
    assert tokens[-1] == 0
    assert made.decode(tokens[:-1].tolist()).encode() == DOCUMENTS[3]
    with pytest.raises(ConfigError, match=r"model.vocab_size: 256 is too small for data.tokenizer"):
        load().replace(data__tokenizer=str(path)).check()


def test_a_sentencepiece_tokenizer(tmp_path):
    sp = pytest.importorskip("sentencepiece", reason="of the extra hf")
    (tmp_path / "text").write_bytes(b"\n".join(DOCUMENTS))
    prefix = str(tmp_path / "m")
    sp.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=prefix, vocab_size=40, minloglevel=2)
    got = tokenizers.load(f"{prefix}.model")
    assert (got.vocab_size, got.eos) == (40, 2)
    assert got.document(b"document 3")[-1] == 2


@pytest.mark.parametrize(
    ("name", "shown"),
    [("nowhere.json", "there is no file"), ("a.txt", "neither a tokenizer.json nor a .model"), ("a.json", "cannot be")],
)
def test_what_is_no_tokenizer(name, shown, tmp_path):
    for there in ("a.txt", "a.json"):
        (tmp_path / there).write_text("{}")
    with pytest.raises(ConfigError, match=f"data.tokenizer: .*{shown}"):
        tokenizers.load(str(tmp_path / name))


# ---------------------------------------------------------------------------------------------- deepinit data


@pytest.mark.parametrize("kind", ["jsonl", "arrayrecord", "txt"])
def test_tokenizing_goes_on_where_it_stopped(trained, tmp_path, kind):
    path, made = trained
    if kind == "txt":
        for i, d in enumerate(DOCUMENTS):
            (tmp_path / f"{i:02}.txt").write_bytes(d)
        files = (str(tmp_path / "*.txt"),)
    else:
        for i in range(2):
            {"jsonl": jsonl, "arrayrecord": array_record}[kind](tmp_path / f"{i}.{kind}", DOCUMENTS[20 * i :][:20])
        files = (str(tmp_path / f"*.{kind}"),)
    config = DataConfig(files, tokenizer=str(path))
    whole = tmp_path / "whole.bin"
    count = prepare.prepare(config, whole)
    wanted = np.concatenate([[*made.encode(d.decode()).ids, 0] for d in DOCUMENTS])
    assert count == len(wanted)
    got = sources.tokens(whole)
    assert (got.tokens == wanted).all()
    assert got.eos == 0

    parts = tmp_path / "parts.bin"
    for stop in (7, 20, 1):
        prepare.prepare(config, parts, stop_after=stop)
        with parts.open("ab") as f:
            f.write(b"lost")  # written, and not yet known to be whole
        with pytest.raises(ConfigError, match="is not finished"):
            sources.tokens(parts)
    assert prepare.prepare(config, parts) == count
    assert parts.read_bytes() == whole.read_bytes()
    assert prepare.prepare(config, parts) == count  # nothing more to do


def test_another_work_is_not_overwritten(tmp_path):
    jsonl(tmp_path / "a.jsonl")
    config = DataConfig((str(tmp_path / "a.jsonl"),))
    out = tmp_path / "o.bin"
    prepare.prepare(config, out, stop_after=3)
    jsonl(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="was begun with other files"):
        prepare.prepare(DataConfig((str(tmp_path / "*.jsonl"),)), out)
    out.with_suffix(".json").unlink()
    with pytest.raises(ConfigError, match=r"is there already, and no o.json says what it is"):
        prepare.prepare(config, out)
