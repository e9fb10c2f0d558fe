"""The JSON that the server returns. FastAPI makes the OpenAPI description from these classes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Score(BaseModel):
    """A class of an image."""

    index: int = Field(alias="class", description="class index, from 0")
    name: str | None = Field(description="null if the file has no class names")
    logit: float = Field(description="code times the scale of the output")
    code: int = Field(description="the integer that the program returns; the same on every machine")
    probability: float = Field(description="softmax of all logits, computed in float")


class Classified(BaseModel):
    top: list[Score] = Field(description="best first")


class Classification(BaseModel):
    """Answer of /v1/classify."""

    model: str
    fingerprint: str = Field(description="SHA-256 of the program; equal fingerprints give equal results")
    results: list[Classified] = Field(description="one per image, in the order of the images")


class Codes(BaseModel):
    """What the integers of an embedding mean: value = (code - zero) * scale."""

    scale: float
    zero: int


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int = Field(description="position of the image in the request")
    embedding: list[float] | list[int] | str = Field(description="floats, float32 bytes in base64, or integer codes")


class Usage(BaseModel):
    """Always 0; OpenAI clients expect it."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class EmbeddingList(BaseModel):
    """Answer of /v1/embeddings, in the shape that OpenAI clients know."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage = Usage()
    fingerprint: str
    codes: Codes | None = Field(default=None, description='only for encoding_format "int"')


class Mask(BaseModel):
    """A mask in COCO's run-length encoding."""

    size: list[int] = Field(description="height, width")
    counts: str


class Detection(BaseModel):
    box: list[float] = Field(description="x, y, width, height in pixels of the image")
    score: float
    index: int = Field(alias="class", description="category id of the detector's settings")
    name: str
    mask: Mask | None = None


class Detected(BaseModel):
    height: int
    width: int
    detections: list[Detection] = Field(description="best first")


class Detections(BaseModel):
    """Answer of /v1/detect."""

    model: str
    fingerprint: str
    results: list[Detected]


class ModelInfo(BaseModel):
    """A model of this server, in the shape that OpenAI clients know."""

    id: str = Field(description="the name by which requests choose the model")
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "fqvit"
    architecture: str
    tasks: list[str]
    fingerprint: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


class Error(BaseModel):
    message: str
    type: str
    param: None = None
    code: None = None


class ErrorAnswer(BaseModel):
    """Answer to a request that was rejected, in the shape that OpenAI clients know."""

    error: Error
