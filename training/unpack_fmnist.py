"""Write the 10,000 Fashion-MNIST test images as a folder for `fqvit eval --data`: OUTPUT/<class index>/<image index>.png."""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image
from train_fmnist import DEBIAN_FOLDER, read_split


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the Fashion-MNIST test images as a folder for `fqvit eval --data`.")
    parser.add_argument("--data", type=Path, default=DEBIAN_FOLDER, help="folder with the four idx .gz files")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    images, labels = (part.numpy() for part in read_split(arguments.data, "t10k"))
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = arguments.output / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:05}.png", compress_level=1)


if __name__ == "__main__":
    main()
