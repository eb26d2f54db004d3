"""d2l_note: a weekly note after Dive into Deep Learning."""
