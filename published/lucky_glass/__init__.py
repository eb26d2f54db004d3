"""lucky_glass: a blog post of 2023, Multi30k, German to English."""
