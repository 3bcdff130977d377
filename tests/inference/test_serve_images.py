"""Images in requests to `paceline serve`."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from api_servers import serve_api
from openai import BadRequestError
from PIL import Image
from vision_models import make_model

from paceline.inference.generate import generate


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    content = io.BytesIO()
    image.save(content, kind)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def question(url: str, num_images: int = 1) -> Any:
    images = [{"type": "image_url", "image_url": {"url": url}}] * num_images
    return [{"role": "user", "content": [*images, {"type": "text", "text": "Which color?"}]}]


@pytest.mark.soak
def test_answer_to_an_image_is_that_of_generate(tmp_path: Path) -> None:
    make_model(tmp_path / "seeing" / "model", "llava")
    red = Image.new("RGB", (36, 24), "red")
    red.save(tmp_path / "red.png")
    expected = generate(
        tmp_path / "seeing", "Which color?", images=[str(tmp_path / "red.png")], max_new_tokens=12
    )
    with serve_api(tmp_path / "seeing") as server:
        completions = server.client().chat.completions
        settings: dict[str, Any] = {"model": "seeing", "temperature": 0, "max_tokens": 12}
        answer = completions.create(messages=question(data_url(red)), **settings)
        assert answer.choices[0].message.content == expected
        refused = {
            "image-too-large": question(data_url(Image.new("1", (20_000, 20_000)))),
            "image-format-refused": question(data_url(red, "TIFF")),
            "image-not-read": question(data_url(red, "EPS")),  # a program
            "too-many-images": question(data_url(red), 65),
        }
        refused["image-too-large "] = question(data_url(Image.new("1", (6_000, 6_000))), 2)
        for code, messages in refused.items():
            with pytest.raises(BadRequestError) as caught:
                completions.create(messages=messages, **settings)
            assert caught.value.code == code.strip()
