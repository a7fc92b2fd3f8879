"""Texts as rows of word ids of a fixed length, without a vocabulary."""

import csv
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.errors import DataError
from data.npz import Samples

LENGTH = 200
PADDING = 0
# With the padding, 2**15 ids: as many as model fasttext has rows.
BUCKETS = 2**15 - 1

_NEWS_CLASSES = ("1", "2", "3", "4")


def tokens(texts: Sequence[str]) -> npt.NDArray[np.int32]:
    r"""Return the word ids of each text, int32 (texts, 200): its first 200 words, then padding, 0.

    A word is what ``\w+`` matches in the lower-cased text. Its id is the CRC-32 (zlib's) of its UTF-8 bytes modulo
    2**15 - 1, plus 1: the same in every process and on every node. Hashing takes the place of a vocabulary, as fastText
    hashes its n-grams (Joulin et al. 2017, section 2.3), because a vocabulary is counted from texts: those of other
    clients, or of validation and test, would enter it, and nodes would have to exchange word lists. The price is that
    words may share an id.
    """
    ids = np.full((len(texts), LENGTH), PADDING, dtype=np.int32)
    for row, text in zip(ids, texts, strict=True):
        words = re.findall(r"\w+", text.lower())[:LENGTH]
        row[: len(words)] = [zlib.crc32(word.encode()) % BUCKETS + 1 for word in words]
    return ids


def read_news(path: Path) -> Samples:
    r"""Return one part of AG News (Zhang et al. 2015): title and description as ``tokens``, classes 1-4 as 0-3.

    The file is CSV with every field in double quotes and ``""`` for a quote inside. A backslash is no escape: it stands
    where the text had a line break, also right before a closing quote, and separates words.

    Raises:
        DataError: the file cannot be read as such; names the line.
    """
    texts, labels = [], []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file, strict=True)
            for row in rows:
                if len(row) != 3 or row[0] not in _NEWS_CLASSES:
                    raise DataError(f"{path}: line {rows.line_num} is not a class (1 to 4), a title, a description")
                texts.append(f"{row[1]} {row[2]}")
                labels.append(int(row[0]) - 1)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV ({error})") from error
    if not texts:
        raise DataError(f"{path}: has no texts")
    return Samples(tokens(texts), np.asarray(labels, dtype=np.int64))
