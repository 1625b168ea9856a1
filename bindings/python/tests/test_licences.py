"""The installed wheel, which .ci/python builds from the sdist, has the texts of its licences."""

from importlib.metadata import distribution


def test_wheel_has_licence_texts() -> None:
    package = distribution("fourtuple")
    for name, sentence in (
        ("LICENSE-MIT", "Permission is hereby granted, free of charge"),
        ("LICENSE-APACHE", "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION"),
    ):
        text = package.read_text(f"licenses/{name}")
        assert text is not None and sentence in text, name
