"""lucky_glass: a blog of 2023, Multi30k, German to English."""
