"""`ottava data tokenize INPUT ... OUTPUT`."""

from __future__ import annotations

import argparse

from ottava.cli.streams import refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava data`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "make a token file from text, JSONL (.gz) or parquet files, or folders of them"
    sub = actions.add_parser("tokenize", help=about, description=f"{about}.")
    sub.add_argument("inputs", nargs="+", metavar="INPUT", help="a file or a folder")
    sub.add_argument("--output", required=True, help="the token file, such as corpus.tokens")
    sub.add_argument("--tokenizer", default="byte", help='"byte" (default), or the path of a tokenizer.json')
    sub.add_argument("--field", default="text", help="where JSONL and parquet have the text (default: text)")
    sub.add_argument("--end-token", help="the token that ends a document, if it has an unusual name")
    sub.add_argument("--overwrite", action="store_true", help="replace the token file if it exists")
    sub.set_defaults(run=_tokenize)


def _tokenize(options: argparse.Namespace) -> int:
    from ottava.train.tokenize import tokenize

    try:
        words = (options.output, options.tokenizer, options.field, options.end_token, options.overwrite)
        print(tokenize(options.inputs, *words))
    except (ValueError, OSError) as error:
        return refuse("ottava data tokenize", error)
    return 0
