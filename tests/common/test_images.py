"""Images of users and tools: what is read, what is rejected with which error, and how they are stored."""

from __future__ import annotations

import base64
import hashlib
import pickle
from pathlib import Path

import pytest
from PIL import Image as Pillow

from tests.kits.pictures import BLUE, GREEN, RED, SVG, animated, bomb, file_of, jpeg, picture
from TrainingFactory.common import images
from TrainingFactory.common.image_parts import make_openai_content, read_parts
from TrainingFactory.common.images import (
    ImageLimits,
    ImageStore,
    as_text,
    images_from_rows,
    images_to_rows,
    is_image,
    join_pieces,
    limit_images,
    read_image,
    shift_images,
    split_text,
)
from TrainingFactory.types import Image, Message, PlacedImage, ToolResult


def test_digest_is_of_size_and_pixels() -> None:
    image = read_image(file_of(Pillow.new("RGB", (2, 1), (1, 2, 3))))
    assert image.digest == hashlib.sha256(b"2x1:" + bytes([1, 2, 3, 1, 2, 3])).hexdigest()
    assert (image.width, image.height) == (2, 1)
    lossless = read_image(file_of(Pillow.new("RGB", (2, 1), (1, 2, 3)), "WEBP", lossless=True))
    assert lossless == image and hash(lossless) == hash(image)
    assert read_image(file_of(Pillow.new("RGB", (1, 2), (1, 2, 3)))) != image  # the same bytes of pixels


def test_data_is_canonical_and_has_no_metadata() -> None:
    exif = Pillow.Exif()
    exif[0x010E] = "a secret description"
    image = read_image(jpeg(exif=exif.tobytes()))
    assert b"secret" in jpeg(exif=exif.tobytes()) and b"secret" not in image.data
    assert read_image(image.data) == image and read_image(image.data).data == image.data


def test_orientation_is_applied() -> None:
    sideways = Pillow.new("RGB", (2, 1), RED)
    sideways.putpixel((1, 0), BLUE)
    exif = Pillow.Exif()
    exif[0x0112] = 6  # shown rotated by 90 degrees: the left pixel is on top
    image = read_image(file_of(sideways, "PNG", exif=exif.tobytes()))
    upright = Pillow.new("RGB", (1, 2), RED)
    upright.putpixel((0, 1), BLUE)
    assert image == images.image_from_pillow(upright)


def test_transparent_pixels_are_white() -> None:
    clear = file_of(Pillow.new("RGBA", (3, 3), (9, 9, 9, 0)))
    assert read_image(clear) == picture((255, 255, 255), (3, 3))


HOSTILE = {
    "bomb": (bomb(), "too many pixels; at most 20,000,000"),
    "large": (bomb(6000, 5000), "6000 x 5000 pixels; at most 20,000,000"),
    "empty": (b"", "not a valid image"),
    "text": (b"hello", "not a valid image"),
    "svg": (SVG, "not a valid image in PNG, JPEG or WebP"),
    "gif": (animated("GIF"), "not a valid image in PNG, JPEG or WebP"),
    "still gif": (file_of(Pillow.new("RGB", (4, 4)), "GIF"), "not a valid image in PNG, JPEG or WebP"),
    "bmp": (file_of(Pillow.new("RGB", (4, 4)), "BMP"), "not a valid image in PNG, JPEG or WebP"),
    "animated webp": (animated("WEBP"), "animated"),
    "animated png": (animated("PNG"), "animated"),
    "cut": (file_of(Pillow.effect_noise((64, 64), 90))[:-400], "damaged"),
    "cut jpeg": (jpeg(size=(64, 64))[:-300], "damaged"),
    "header only": (bomb(4, 4), "damaged"),
    "huge": (b"\x89PNG" + bytes(10_000_000), "10,000,004 bytes; at most 10,000,000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str) -> None:
    data, text = HOSTILE[name]
    with pytest.raises(ValueError, match=text):
        read_image(data)


def test_what_is_an_image() -> None:
    assert all(
        map(is_image, (picture(), picture().data, jpeg(), Pillow.new("L", (1, 1)), SVG, animated("GIF")))
    )
    assert not any(map(is_image, (b"text", b"", "data:image/png;base64,", {"bytes": b""}, None, [picture()])))


# Texts with images

A, B, C = (picture(color) for color in (RED, GREEN, BLUE))


def test_pieces() -> None:
    content, placed = join_pieces(["see ", A, B, " and", C])
    assert (content, placed) == ("see  and", [PlacedImage(4, A), PlacedImage(4, B), PlacedImage(8, C)])
    assert split_text(content, placed) == ["see ", A, B, " and", C]
    assert as_text(content, placed) == "see [image 8x6][image 8x6] and[image 8x6]"
    assert join_pieces(["a", A, "b", ""], "\n") == ("a\nb", [PlacedImage(1, A)])
    assert as_text("plain", []) == "plain"


def test_images_move_with_a_truncated_text() -> None:
    old = "0123456789" * 4
    new = old[:10] + "[cut]" + old[-8:]
    placed = [PlacedImage(place, image) for place, image in ((3, A), (20, B), (36, C))]
    shown = split_text(new, shift_images(placed, old, new))
    assert shown == ["012", A, "3456789[cut]", B, "2345", C, "6789"]
    assert shift_images(placed, old, old) == placed
    # equal text on both sides of the cut: places stay within the text
    for place in range(7):
        [(at, _)] = shift_images([PlacedImage(place, A)], "aaaaaa", "aaaa")
        assert 0 <= at <= 4


def test_at_most_so_many_images_are_shown() -> None:
    content, placed = limit_images([PlacedImage(0, A), PlacedImage(1, B), PlacedImage(3, C)], "xyz", 1)
    note = "[image not shown: at most 8 images a turn]"
    assert split_text(content, placed) == [A, f"x{note}yz{note}"]
    assert limit_images([PlacedImage(1, A)], "xyz", 1) == ("xyz", [PlacedImage(1, A)])
    assert limit_images([PlacedImage(1, A)], "xyz", 0) == (f"x{note}yz", [])


def test_repr_names_digests_only_where_there_are_images() -> None:
    assert repr(Message("user", "a")) == (
        "Message(role='user', content='a', tool_calls=[], tool_call_id=None, name=None, reasoning=None)"
    )
    assert "images" not in repr(ToolResult("a"))
    one, other = (repr(Message("user", "a", images=[PlacedImage(0, image)])) for image in (A, B))
    assert one != other and A.digest in one and "PNG" not in one


# Parts of contents


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


PARTS = {
    "openai": {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{b64(jpeg())}"}},
    "responses": {"type": "input_image", "image_url": f"data:image/jpeg;base64,{b64(jpeg())}"},
    "anthropic": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/jpeg", "data": b64(jpeg())},
    },
    "gemini": {"inlineData": {"mimeType": "image/jpeg", "data": base64.urlsafe_b64encode(jpeg()).decode()}},
    "mcp": {"type": "image", "data": b64(jpeg()), "mimeType": "image/jpeg"},
    "hugging face": {"type": "image", "image": Pillow.open(__import__("io").BytesIO(jpeg()))},
}


@pytest.mark.parametrize("name", PARTS)
def test_image_parts(name: str) -> None:
    content, placed = read_parts(["a ", {"type": "text", "text": "b "}, PARTS[name], {"text": "c"}])
    assert (content, placed) == ("a b c", [PlacedImage(4, read_image(jpeg()))])


def test_openai_parts_round_trip() -> None:
    content, placed = join_pieces(["see ", A, B, " and", C])
    parts = make_openai_content(Message("user", content, images=placed))
    assert [part["type"] for part in parts if isinstance(part, dict)] == [
        "text", "image_url", "image_url", "text", "image_url",
    ]  # fmt: skip
    assert read_parts(parts) == (content, placed)
    assert make_openai_content(Message("user", "text")) == "text"


REJECTED_PARTS = {
    "address": ({"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}, "only data: URLs"),
    "file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "only data: URLs"),
    "path": ({"type": "image", "image": "/etc/passwd"}, "only data: URLs"),
    "anthropic file": ({"type": "image", "source": {"type": "file", "file_id": "x"}}, "source 'file'"),
    "no data": ({"type": "image"}, "no image"),
    "number": ({"inlineData": {"data": 3}}, "base64"),
    "no base64": ({"type": "image", "data": "%%%"}, "base64"),
    "text in base64": ({"type": "image", "data": b64(b"hello there")}, "not a valid image"),
    "huge": ({"type": "image", "data": "A" * 14_000_000}, "10,000,000 bytes"),
    "video": (
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        "only text and images",
    ),
}


@pytest.mark.parametrize("name", REJECTED_PARTS)
def test_rejected_parts(name: str) -> None:
    part, text = REJECTED_PARTS[name]
    with pytest.raises(ValueError, match=text):
        read_parts([part])


# The store


def test_store_writes_once(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    store.add(A)
    path = store.find_path(A.digest)
    assert path.read_bytes() == A.data and path.parent.name == A.digest[:2]
    written = path.stat().st_mtime_ns, path.stat().st_ino
    store.add(A)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written
    assert store.read(A.digest) == A
    assert [entry for entry in path.parent.iterdir() if entry != path] == []


def test_store_detects_damage(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    store.add(A)
    store.find_path(A.digest).write_bytes(B.data)
    with pytest.raises(ValueError, match="another digest"):
        store.read(A.digest)
    with pytest.raises(ValueError, match="No such file"):
        store.read(B.digest)
    for bad in ("../../etc/passwd", "a" * 63, "A" * 64, f"{A.digest}/../x"):
        with pytest.raises(ValueError, match="not the digest"):
            store.read(bad)


def test_rows_of_images(tmp_path: Path) -> None:
    placed = [PlacedImage(0, A), PlacedImage(3, B)]
    alone = images_to_rows(placed, None)
    assert [image.data for _, image in images_from_rows(alone, None)] == [A.data, B.data]
    store = ImageStore(tmp_path)
    stored = images_to_rows(placed, store)
    assert stored == [
        {"place": 0, "digest": A.digest, "width": 8, "height": 6},
        {"place": 3, "digest": B.digest, "width": 8, "height": 6},
    ]
    read = images_from_rows(stored, store)
    assert read == placed and [image.data for _, image in read] == [A.data, B.data]
    copy = pickle.loads(pickle.dumps(read[0].image))
    assert type(copy) is Image and copy == A and copy.data == A.data
    with pytest.raises(ValueError, match="no folder"):
        images_from_rows(stored, None)
    with pytest.raises(ValueError, match="not the digest"):
        images_from_rows([stored[0] | {"digest": "../x"}], store)


def test_unused_images_are_removed(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    for image in (A, B):
        store.add(image)
    (store.find_path(A.digest).parent / ".x.part").write_bytes(b"")
    assert store.remove_unused({A.digest}) == 2
    assert store.find_path(A.digest).exists() and not store.find_path(B.digest).exists()
    assert ImageStore(tmp_path / "none").remove_unused(set()) == 0


def test_limits_apply_to_python_objects() -> None:
    with pytest.raises(ValueError, match="at most 10 "):
        images.image_from_pillow(Pillow.new("RGB", (4, 3)), ImageLimits(max_pixels=10))
