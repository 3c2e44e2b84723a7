"Hand setuptools the packaging facts of settings.ini; the rest of them are in pyproject.toml."

from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

config = ConfigParser(delimiters=["="], interpolation=None)
config.read_string(Path(__file__).with_name("settings.ini").read_text(encoding="utf-8"))
cfg, suffix = config["DEFAULT"], "_requirements"


def lines(key):
    return [o.strip() for o in cfg[key].splitlines() if o.strip()]


setup(
    python_requires=f">={cfg['min_python']}",
    install_requires=lines("requirements"),
    extras_require={k.removesuffix(suffix): lines(k) for k in cfg if k.endswith(suffix)},
    # All entry points stand here: next to static ones in pyproject.toml, setuptools would drop these without a word.
    entry_points={"console_scripts": lines("console_scripts"), "nbdev": ["coupled_qk = coupled_qk._modidx:d"]},
    keywords=cfg["keywords"].split(),
    classifiers=lines("classifiers"),
)
