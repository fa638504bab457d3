"""/v1/score, /v1/rerank, /classify and /pooling over small random models: classifiers, rerankers that are language
models, and embeddings.
"""

from __future__ import annotations

import pytest
import torch

from quire.cli.api_client import Server
from quire.cli.chat import chat
from quire.server.generate.scoring import activated
from quire.server.offline.llm import LLM
from tests.helpers.models.checkpoints import load_reference
from tests.helpers.models.embedders import (
    TEXTS,
    build_classifier,
    build_embedder,
    build_reranker,
    reference_embeddings,
    reference_logits,
)
from tests.helpers.models.encoders import build_encoder
from tests.helpers.server.running import MODEL, running_server

pytestmark = pytest.mark.slow

QUERY, DOCUMENTS = "What is the capital of France?", ["The capital of France is Paris.", "engine", TEXTS[2], TEXTS[3]]


def serving(folder: str, **options):
    options |= {"distributed_executor_backend": "uniproc", "kv_cache_memory_bytes": 64 << 20}
    return running_server(folder, **options)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    with serving(build_classifier(tmp_path_factory.mktemp("cross") / "model", ["LABEL_0"])) as running:
        yield running.wait_ready(120)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = build_classifier(tmp_path_factory.mktemp("classifier") / "model", ["bad", "so so", "good"], "llama3")
    with serving(folder) as running:
        yield running.wait_ready(120)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    with serving(build_reranker(tmp_path_factory.mktemp("reranker") / "model")) as running:
        yield running.wait_ready(120)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    with serving(build_embedder("qwen3", tmp_path_factory.mktemp("embedder") / "model", mode="mean")) as running:
        yield running.wait_ready(120)


def post(server, path: str, **body):
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scores(server, path: str = "/v1/score", **body) -> torch.Tensor:
    data = post(server, path, **body)["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return torch.tensor([item["score"] for item in data])


def pair_ids(server, documents=DOCUMENTS) -> list[list[int]]:
    return [ids for ids, *_ in server.state.tokenizer.encode_pairs([(QUERY, document) for document in documents])]


def folder_of(server) -> str:
    return server.config.model.model


def test_a_cross_encoder_equals_transformers(cross_encoder):
    logits = reference_logits(folder_of(cross_encoder), pair_ids(cross_encoder))[:, 0]
    found = scores(cross_encoder, text_1=QUERY, text_2=DOCUMENTS)
    torch.testing.assert_close(found, logits.sigmoid(), rtol=1e-5, atol=1e-5)
    raw = scores(cross_encoder, "/score", queries=[QUERY] * 4, documents=DOCUMENTS, use_activation=False)
    torch.testing.assert_close(raw, logits, rtol=1e-5, atol=1e-5)


def test_a_reranker_equals_transformers(reranker):
    """The score is the difference of two logits after the chat template."""
    model = load_reference(folder_of(reranker))
    expected = []
    for document in DOCUMENTS:
        ids = reranker.state.tokenizer.encode(
            f"<Instruct>: Judge by the web.<Query>: {QUERY}<Document>: {document}<|im_end|>", False
        )
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected.append((logits[100] - logits[200]).sigmoid())
    found = scores(reranker, text_1=QUERY, text_2=DOCUMENTS)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_a_reranker_equals_sentence_transformers(reranker):
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(folder_of(reranker), device="cpu")
    expected = model.predict([(QUERY, document) for document in DOCUMENTS], convert_to_tensor=True).float()
    torch.testing.assert_close(scores(reranker, text_1=QUERY, text_2=DOCUMENTS), expected, rtol=1e-5, atol=1e-5)


def test_embeddings_score_by_their_cosine(embedder):
    vectors = reference_embeddings(folder_of(embedder), [QUERY, *DOCUMENTS])
    answer = post(embedder, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    found = torch.tensor([item["score"] for item in answer["data"]])
    torch.testing.assert_close(found, vectors[1:] @ vectors[0], rtol=1e-5, atol=1e-5)
    ids = embedder.state.tokenizer.encode_batch([QUERY, *DOCUMENTS])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))  # the query is computed once
    pairs = scores(embedder, text_1=DOCUMENTS, text_2=DOCUMENTS)
    torch.testing.assert_close(pairs, torch.ones(4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank_sorts(cross_encoder, path):
    expected = scores(cross_encoder, text_1=QUERY, text_2=DOCUMENTS)
    documents = [DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])]
    answer = post(cross_encoder, path, query=QUERY, documents=documents, top_n=3, model=MODEL)
    order = expected.argsort(descending=True).tolist()[:3]
    assert [result["index"] for result in answer["results"]] == order
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(float(expected[result["index"]]), abs=1e-5)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    bare = post(cross_encoder, path, query=QUERY, documents=DOCUMENTS, return_documents=False)
    assert len(bare["results"]) == 4 and "document" not in bare["results"][0]
    assert bare["usage"]["total_tokens"] == sum(map(len, pair_ids(cross_encoder)))


def test_rerank_as_tei_has_it(cross_encoder, embedder):
    logits = torch.tensor(
        [
            item["score"]
            for item in post(cross_encoder, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)["data"]
        ]
    )
    order = logits.argsort(descending=True).tolist()
    answer = post(cross_encoder, "/rerank", query=QUERY, texts=DOCUMENTS)
    assert [rank["index"] for rank in answer] == order and set(answer[0]) == {"index", "score"}
    for rank in answer:
        assert rank["score"] == pytest.approx(float(logits.sigmoid()[rank["index"]]), abs=1e-5)
    raw = post(cross_encoder, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True, return_text=True)
    assert [rank["text"] for rank in raw] == [DOCUMENTS[i] for i in order]
    assert raw[0]["score"] == pytest.approx(float(logits.max()), abs=1e-5)
    cosines = post(embedder, "/rerank", query=QUERY, texts=DOCUMENTS)
    assert max(rank["score"] for rank in cosines) <= 1.0001
    for body in ({"query": "a"}, {"query": "a", "texts": []}, {"texts": ["b"]}):
        assert cross_encoder.http.post("/rerank", json=body).status_code == 400


def test_the_terminal_knows_that_a_model_makes_no_text(cross_encoder, server, capsys):
    for one, expected in ((cross_encoder, True), (server, False)):
        assert Server(f"{one.url}/v1", None).makes_no_text(MODEL) is expected
    assert chat(["--url", cross_encoder.url]) == 1
    assert "makes no text" in capsys.readouterr().err


def test_embed_as_tei_has_it(embedder, cross_encoder):
    vectors = reference_embeddings(folder_of(embedder), DOCUMENTS)
    found = torch.tensor(post(embedder, "/embed", inputs=DOCUMENTS))
    torch.testing.assert_close(found, vectors, rtol=1e-5, atol=1e-5)
    assert post(embedder, "/embed", inputs=DOCUMENTS[0]) == [pytest.approx(vectors[0].tolist(), abs=1e-5)]
    plain = torch.tensor(post(embedder, "/embed", inputs=DOCUMENTS, normalize=False))
    torch.testing.assert_close(torch.nn.functional.normalize(plain), vectors, rtol=1e-5, atol=1e-5)
    long = "word " * 3000
    assert len(post(embedder, "/embed", inputs=[long, "b"], truncation_direction="Left")) == 2
    refused = embedder.http.post("/embed", json={"inputs": long, "truncate": False})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "inputs"
    assert cross_encoder.http.post("/embed", json={"inputs": "a"}).status_code == 400


def test_truncation_shortens_the_document(cross_encoder, reranker):
    tokenizer = cross_encoder.state.tokenizer
    (ids,), query = pair_ids(cross_encoder, [TEXTS[2]]), tokenizer.encode(QUERY, False)
    size = len(query) + 6
    expected = reference_logits(folder_of(cross_encoder), [[*ids[: size - 1], 2]])[0].sigmoid()
    found = scores(cross_encoder, text_1=QUERY, text_2=TEXTS[2], truncate_prompt_tokens=size)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    long = post(reranker, "/v1/score", text_1=QUERY, text_2=TEXTS[2], truncate_prompt_tokens=60)
    assert 50 < long["usage"]["prompt_tokens"] <= 60
    for server in (cross_encoder, reranker):
        answer = server.http.post("/v1/score", json={"text_1": QUERY, "text_2": "a", "truncate_prompt_tokens": 5})
        assert answer.status_code == 400 and "no room for a document" in answer.json()["error"]["message"]


def test_classify_equals_transformers(classifier):
    ids = classifier.state.tokenizer.encode_batch(TEXTS)
    expected = reference_logits(folder_of(classifier), ids)
    answer = post(classifier, "/classify", input=TEXTS)
    for item, logits in zip(answer["data"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(item["probs"]), logits.softmax(0), rtol=1e-5, atol=1e-5)
        assert item["label"] == ["bad", "so so", "good"][int(logits.argmax())] and item["num_classes"] == 3
    raw = post(classifier, "/pooling", input=ids[:1], use_activation=False)["data"][0]
    torch.testing.assert_close(torch.tensor(raw["data"]), expected[0], rtol=1e-5, atol=1e-5)
    refused = classifier.http.post("/v1/score", json={"text_1": "a", "text_2": "b"})
    assert refused.status_code == 400 and "3 labels" in refused.json()["error"]["message"]


def test_pooling_returns_embeddings(embedder):
    expected = reference_embeddings(folder_of(embedder), TEXTS)
    found = torch.tensor([item["data"] for item in post(embedder, "/pooling", input=TEXTS)["data"]])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    refused = embedder.http.post("/pooling", json={"input": "a", "task": "classify"})
    assert refused.status_code == 400 and "no classifier" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["word " * 3000]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/classify", {"input": [[9999]]}, "input"),
    ],
)
def test_wrong_input(cross_encoder, path, body, param):
    answer = cross_encoder.http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_server_without_vectors_refuses(server):
    for path, body in [
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/classify", {"input": "a"}),
        ("/pooling", {"input": "a"}),
    ]:
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model", answer.text


def test_activations():
    assert activated([0.0, 0.0], "softmax") == [0.5, 0.5] and activated([0.0], "sigmoid") == [0.5]
    assert activated([-1000.0, 1000.0], "sigmoid") == [0.0, 1.0] and activated([3.0], "identity") == [3.0]
    assert sum(activated([1000.0, 999.0, -1000.0], "softmax")) == pytest.approx(1)


def test_offline(cross_encoder, classifier, embedder):
    folder = folder_of(embedder)
    with LLM(folder, kv_cache_memory_bytes=64 << 20) as llm:
        expected = reference_embeddings(folder, TEXTS)
        found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS)])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        (short,) = llm.embed(llm.tokenizer.encode(TEXTS[0]), dimensions=4)
        torch.testing.assert_close(
            torch.tensor(short.outputs.embedding), torch.nn.functional.normalize(expected[0, :4], dim=0)
        )
        (score,) = llm.score(TEXTS[0], TEXTS[1])
        assert score.outputs.score == pytest.approx(float(expected[0] @ expected[1]), abs=1e-5)
        for wrong, message in [
            (lambda: llm.classify("a"), "is no classifier"),
            (lambda: llm.generate("a"), "generates no text"),
            (lambda: llm.score(["a", "b"], ["c"]), "give one, or as many"),
            (lambda: llm.embed([]), "at least one"),
        ]:
            with pytest.raises(ValueError, match=message):
                wrong()
    with LLM(folder_of(classifier), kv_cache_memory_bytes=64 << 20) as llm:
        expected = reference_logits(folder_of(classifier), [llm.tokenizer.encode(text) for text in TEXTS]).softmax(1)
        found = torch.tensor([output.outputs.probs for output in llm.classify(TEXTS)])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["quire", "transformers"])
def test_an_encoder_scores_pairs_as_sentence_transformers_does(implementation, tmp_path):
    """BERT: the tokens of the document have a type of their own."""
    from sentence_transformers import CrossEncoder

    folder = build_encoder("bert", tmp_path / "model", "ForSequenceClassification", num_labels=1)
    model = CrossEncoder(folder, device="cpu")
    expected = model.predict([(QUERY, document) for document in DOCUMENTS], convert_to_tensor=True).float()
    with serving(folder, model_impl=implementation) as running:
        running.wait_ready(120)
        found = scores(running, text_1=QUERY, text_2=DOCUMENTS)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        answer = running.http.post("/v1/score", json={"text_1": QUERY, "text_2": "word " * 600})
        assert answer.status_code == 400 and "512" in answer.text


def test_a_token_classifier_judges_each_token(tmp_path):
    import transformers

    folder = build_encoder("bert", tmp_path / "model", "ForTokenClassification", num_labels=3)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    ids = [[3, 20, 30, 2], [3, 7, 2]]
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in ids]
    with serving(folder) as running:
        running.wait_ready(120)
        for more, function in (({}, torch.nn.Softmax(1)), ({"use_activation": False}, torch.nn.Identity())):
            for item, logits in zip(post(running, "/pooling", input=ids, **more)["data"], expected):
                torch.testing.assert_close(torch.tensor(item["data"]), function(logits), rtol=1e-5, atol=1e-5)
        for path, what in (("/classify", "is no classifier of texts"), ("/v1/embeddings", "makes no embeddings")):
            answer = running.http.post(path, json={"input": "a"})
            assert answer.status_code == 400 and what in answer.text, answer.text
