"""Triton's interpreter, without its largest cost.

It replaces the functions of ``triton.language`` by its own when a kernel is launched, and looks through all
of them again whenever the kernel calls a function: a third of its time, and nothing is left to replace.
"""

from __future__ import annotations

import functools

from triton import language
from triton.runtime import interpreter


def replace_once_per_launch():
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done = set()

    @functools.cache
    def languages_of(function):
        return {id(value) for value in function.__globals__.values()} & {id(language), id(language.core)}

    def replace_unless_done(function):
        """What it returns is used by a launch only, whose call is the first."""
        if done >= languages_of(function):
            return None
        done.update(languages_of(function))
        return replace(function)

    @functools.wraps(launch)
    def launch_anew(self, *args, **kwargs):
        done.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_unless_done, launch_anew
