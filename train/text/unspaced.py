"""The scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana and Chinese characters."""

import re

# Letters and punctuation, as ranges of a character class.
UNSPACED_RANGES = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uff01-\uff1f"
UNSPACED = re.compile(f"[{UNSPACED_RANGES}]")
