"""The endpoints give the same integers as the engine, for every way of sending images."""

from __future__ import annotations

import base64
import struct

import numpy as np
import pytest

from fqvit.inference.model import load
from tests.serve.running import CLASSIFIER, DETECTOR, EMBEDDER, Running, opened, png

FILES = [png(seed, (20 + seed, 30)) for seed in range(5)]


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def codes(answer: dict) -> list[list[tuple[int, int]]]:
    """Return (class, code) of the best classes of each image."""
    return [[(score["class"], score["code"]) for score in result["top"]] for result in answer["results"]]


def expected_scores(top: int) -> list[list[tuple[int, int]]]:
    found = load(CLASSIFIER).classify([opened(file) for file in FILES], top)
    return [[(score.index, score.code) for score in scores] for scores in found]


def test_a_file_as_the_body_gives_the_classes_of_the_engine(server: Running) -> None:
    answers = [server.client.post("/v1/classify?top=3", content=file).json() for file in FILES]
    assert [codes(answer)[0] for answer in answers] == expected_scores(3)
    model = load(CLASSIFIER)
    assert answers[0]["model"] == CLASSIFIER.stem and answers[0]["fingerprint"] == model.fingerprint


def test_a_form_may_have_several_files(server: Running) -> None:
    files = [("image", (f"{number}.png", file)) for number, file in enumerate(FILES)]
    answer = server.client.post("/v1/classify", files=files, data={"top": "2"}).json()
    assert codes(answer) == expected_scores(2)


def test_json_may_have_several_images_with_or_without_a_data_url(server: Running) -> None:
    images = [encoded(FILES[0]), *(f"data:image/png;base64,{encoded(file)}" for file in FILES[1:])]
    answer = server.client.post("/v1/classify", json={"input": images, "model": CLASSIFIER.stem}).json()
    assert codes(answer) == expected_scores(5)
    one = server.client.post("/v1/classify", json={"input": images[0], "top": 1}).json()
    assert codes(one) == expected_scores(1)[:1]


def test_embeddings_come_as_floats_base64_or_integers(server: Running) -> None:
    model = load(EMBEDDER)
    expected = model.embed([opened(file) for file in FILES])

    def ask(encoding: str) -> dict:
        body = {"model": EMBEDDER.stem, "input": [encoded(file) for file in FILES], "encoding_format": encoding}
        return server.client.post("/v1/embeddings", json=body).json()

    floats, text, integers = ask("float"), ask("base64"), ask("int")
    np.testing.assert_array_equal(np.float32([row["embedding"] for row in floats["data"]]), expected.float())
    width = expected.codes().shape[1]
    unpacked = [struct.unpack(f"<{width}f", base64.b64decode(row["embedding"])) for row in text["data"]]
    np.testing.assert_array_equal(np.float32(unpacked), expected.float())
    assert [row["embedding"] for row in integers["data"]] == expected.codes().tolist()
    info = expected.output()
    assert integers["codes"] == {"scale": info.scale, "zero": info.zero} and floats["codes"] is None
    assert [row["index"] for row in floats["data"]] == list(range(len(FILES))) and floats["object"] == "list"


def test_openai_clients_understand_the_embeddings(server: Running) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}v1", api_key="unused") as client:
        answer = client.embeddings.create(model=EMBEDDER.stem, input=[encoded(file) for file in FILES])
        assert EMBEDDER.stem in {model.id for model in client.models.list()}
    expected = load(EMBEDDER).embed([opened(file) for file in FILES]).float()
    np.testing.assert_array_equal(np.float32([row.embedding for row in answer.data]), expected)


def test_detections_equal_those_of_the_detector(server: Running) -> None:
    file = png(1, (40, 60))
    found = load(DETECTOR).detect(opened(file))
    answer = server.client.post("/v1/detect?masks=true", content=file).json()["results"][0]
    assert (answer["height"], answer["width"]) == (40, 60) and len(found.labels) > 0
    boxes = np.array([row["box"] for row in answer["detections"]])
    corners = found.detections.boxes
    np.testing.assert_allclose(boxes, np.hstack([corners[:, :2], corners[:, 2:] - corners[:, :2]]), atol=5e-4)
    assert all(row["mask"]["size"] == [40, 60] for row in answer["detections"])
    scores = [row["score"] for row in answer["detections"]]
    least = scores[len(scores) // 2]
    fewer = server.client.post(f"/v1/detect?score={least}", content=file).json()["results"][0]["detections"]
    assert [row["score"] for row in fewer] == [score for score in scores if score >= least]
    assert fewer[0]["mask"] is None


def test_models_lists_every_file_with_its_tasks(server: Running) -> None:
    models = {model["id"]: model for model in server.client.get("/v1/models").json()["data"]}
    tasks = {name: model["tasks"] for name, model in models.items()}
    assert tasks == {"fqvit_v1": ["classify"], "widths_v2": ["embeddings"], "tokens_v1": [], "opencv_v1": ["detect"]}
    assert models["opencv_v1"]["fingerprint"] == load(DETECTOR).fingerprint


def test_health_metrics_openapi_description_and_pages_are_served(server: Running) -> None:
    assert server.client.get("/healthz").json() == {"status": "ok"}
    server.client.post("/v1/classify", content=FILES[0])
    server.client.get("/any/path")
    metrics = server.client.get("/metrics").text
    assert 'fqvit_requests_total{endpoint="/v1/classify",status="200"}' in metrics
    assert 'fqvit_requests_total{endpoint="other",status="404"}' in metrics
    assert 'fqvit_images_total{model="fqvit_v1"}' in metrics and "fqvit_queue_images 0.0" in metrics
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/v1/classify", "/v1/embeddings", "/v1/detect", "/v1/models", "/healthz", "/metrics"} == set(paths)
    assert "swagger-ui-bundle.js" in server.client.get("/docs").text
    assert server.client.get("/static/swagger-ui-bundle.js").status_code == 200
    page = server.client.get("/").text
    assert "http:" not in page.replace("http://www.w3.org", "") and "https:" not in page  # nothing from other machines
