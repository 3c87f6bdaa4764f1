"""Metrics on pictures: their size, and whether one is an edited other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops, ImageOps, ImageStat

from .reading import opened
from .registry import METRICS

Rules = Mapping[str, Any]
Plane = npt.NDArray[np.float64]
WINDOW = 7
MAX_PIXELS = 40_000_000


def picture(path: str) -> Image.Image:
    """The decoded picture. `Unreadable` for a damaged one, and for one that would fill the memory."""

    def load(path: str) -> Image.Image:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            image.load()
            return image.copy()

    return opened(path, load)


def structural_similarity(first: Image.Image, second: Image.Image) -> float:
    """SSIM with a uniform window of 7 (Wang et al. 2004), the mean over the channels; 1.0 for the same."""
    planes = zip(_planes(first), _planes(second), strict=True)
    return float(np.mean([_plane_similarity(one, other) for one, other in planes]))


def _planes(image: Image.Image) -> list[Plane]:
    return [np.asarray(band, dtype=np.float64) for band in image.split()]


def _plane_similarity(one: Plane, other: Plane) -> float:
    unbias = WINDOW**2 / (WINDOW**2 - 1)
    mean_one, mean_other = _window_mean(one), _window_mean(other)
    variances = unbias * (_window_mean(one**2) - mean_one**2 + _window_mean(other**2) - mean_other**2)
    covariance = unbias * (_window_mean(one * other) - mean_one * mean_other)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    luminance = (2 * mean_one * mean_other + c1) / (mean_one**2 + mean_other**2 + c1)
    return float(np.mean(luminance * (2 * covariance + c2) / (variances + c2)))


def _window_mean(plane: Plane) -> Plane:
    """The mean of each whole window, by differences of a table of sums."""
    sums = np.zeros((plane.shape[0] + 1, plane.shape[1] + 1))
    np.cumsum(np.cumsum(plane, axis=0), axis=1, out=sums[1:, 1:])
    w = WINDOW
    total: Plane = sums[w:, w:] - sums[:-w, w:] - sums[w:, :-w] + sums[:-w, :-w]
    return total / w**2


def _same_structure(first: Image.Image, second: Image.Image, threshold: float = 0.9) -> bool:
    """Equal sizes, at least a window large, and SSIM in RGB at or above the threshold."""
    if first.size != second.size or min(first.size) < WINDOW:
        return False
    return structural_similarity(first.convert("RGB"), second.convert("RGB")) >= threshold


def _brightness(image: Image.Image) -> float:
    return float(ImageStat.Stat(image.convert("L")).mean[0])


def _at_brightness(image: Image.Image, target: float) -> Plane:
    """RGB from 0 to 1, scaled so that the mean brightness is the target's (black stays black)."""
    factor = target / max(_brightness(image), 1e-6)
    scaled = image.convert("RGB").point(lambda value: min(255, int(value * factor)))
    return np.asarray(scaled, dtype=np.float64) / 255


@METRICS.add("check_brightness_decrease_and_structure_sim")
def check_brightness_decrease_and_structure_sim(
    result: str | None, original: str | None, *, threshold: float = 0.03
) -> float:
    """It is darker than the original, and at one brightness their mean squared difference is small."""
    if not result or not original:
        return 0.0
    edited, source = picture(result), picture(original)
    if _brightness(edited) >= _brightness(source):
        return 0.0
    if edited.size != source.size:
        edited = edited.resize(source.size, Image.Resampling.LANCZOS)
    difference = _at_brightness(edited, 128) - _at_brightness(source, 128)
    return float(np.mean(difference**2) < threshold)


@METRICS.add("check_saturation_increase_and_structure_sim")
def check_saturation_increase_and_structure_sim(result: str | None, original: str | None) -> float:
    """It is more saturated than the original, and has its hue and its brightness."""
    if not result or not original:
        return 0.0
    edited, source = picture(result).convert("HSV"), picture(original).convert("HSV")
    more = ImageStat.Stat(edited).mean[1] > ImageStat.Stat(source).mean[1]
    pairs = list(zip(edited.split(), source.split(), strict=True))
    return float(more and all(_same_structure(*pairs[plane]) for plane in (0, 2)))


@METRICS.add("check_contrast_increase_and_structure_sim")
def check_contrast_increase_and_structure_sim(result: str | None, original: str | None) -> float:
    """It has more contrast than the original, and its structure."""
    if not result or not original:
        return 0.0
    edited, source = picture(result), picture(original)
    more = np.std(np.asarray(edited, np.float32)) > np.std(np.asarray(source, np.float32))
    return float(bool(more) and _same_structure(edited, source, threshold=0.65))


@METRICS.add("check_structure_sim")
def check_structure_sim(result: str | None, expected: str | None) -> float:
    """Both have one size and one structure."""
    return float(bool(result and expected) and _same_structure(picture(str(result)), picture(str(expected))))


METRICS.add("check_file_exists_and_structure_sim")(check_structure_sim)


@METRICS.add("check_image_mirror")
def check_image_mirror(result: str | None, original: str | None) -> float:
    """It is the original, left and right changed, nearly pixel by pixel."""
    if not result or not original:
        return 0.0
    mirrored = ImageOps.mirror(picture(original).convert("RGB"))
    return float(_same_structure(picture(result), mirrored, threshold=0.99))


@METRICS.add("check_image_size")
def check_image_size(result: str | None, rules: Rules) -> float:
    """It has the given `width` and `height`; `ignore_transparent` measures what can be seen."""
    if result is None:
        return 0.0
    image = picture(result)
    size = image.size
    transparent = image.mode in ("RGBA", "LA") or "transparency" in image.info
    if rules.get("ignore_transparent", False) and transparent:
        box = image.convert("RGBA").getchannel("A").getbbox()
        size = (box[2] - box[0], box[3] - box[1]) if box else (0, 0)
    wanted = (rules.get("width"), rules.get("height"))
    return float(all(want is None or want == have for want, have in zip(wanted, size, strict=True)))


@METRICS.add("check_image_file_size")
def check_image_file_size(result: str | None, rules: Rules) -> float:
    """The file is smaller than `max_size` bytes."""
    return float(result is not None and Path(result).stat().st_size < rules["max_size"])


@METRICS.add("compare_images")
def compare_images(
    result: str | None, expected: str | None, *, reference_base_result: float | None = None
) -> float:
    """SSIM of both in grey, at the smaller size; with `reference_base_result`, how far it is above that."""
    if not result or not expected:
        return 0.0
    first, second = picture(result).convert("L"), picture(expected).convert("L")
    size = min(first.size, second.size)
    if min(size) < WINDOW:
        return 0.0
    similar = structural_similarity(
        first.resize(size, Image.Resampling.LANCZOS), second.resize(size, Image.Resampling.LANCZOS)
    )
    if reference_base_result is None:
        return max(0.0, similar)
    if similar < reference_base_result + 0.01:
        return 0.0
    return (similar - reference_base_result) / (1 - reference_base_result)


@METRICS.add("compare_image_list")
def compare_image_list(
    result: str | Sequence[str | None] | None, expected: str | Sequence[str | None] | None
) -> float:
    """Every picture is the expected one, pixel by pixel, at that one's size and mode."""
    results = [result] if isinstance(result, str) or result is None else list(result)
    golds = [expected] if isinstance(expected, str) or expected is None else list(expected)
    for path, gold_path in zip(results, golds, strict=False):
        if not path or not gold_path:
            return 0.0
        gold, image = picture(gold_path), picture(path)
        if image.size != gold.size:
            image = image.resize(gold.size, Image.Resampling.LANCZOS)
        if ImageChops.difference(image.convert(gold.mode), gold).getbbox():
            return 0.0
    return 1.0
