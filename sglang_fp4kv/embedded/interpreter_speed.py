"""A faster Triton interpreter that computes the same bits.

A program of a kernel is a few hundred Python-level operations on small arrays, so the interpreter's
own bookkeeping is the cost. Called by `interpreter_fixes.apply`.

Source: triton/runtime/interpreter.py, triton/language/core.py @ 3.8.0
"""

import dataclasses


def apply() -> None:
    """Speed up this process; the caller makes sure that TRITON_INTERPRET is 1."""
    _patch_language_once()
    _remember_types()
    _skip_unused_overflow_check()


def _patch_language_once() -> None:
    """The original replaces and restores some 300 functions of triton.language at every launch, and
    replaces them again at every call of a device function. In a process that only interprets, once
    is enough.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    class NothingToRestore:
        def restore(self):
            pass

    scope = interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    for lang in (tl, tl.core):
        interpreter._patch_builtin(lang, builder, scope)
        interpreter._patch_builtin(lang.tensor, builder, scope)
        interpreter._patch_lang_tensor(lang.tensor, scope)
        interpreter._patch_lang_core(lang, scope)
    interpreter._patch_builtin(tl.math, builder, scope)
    interpreter._patch_builtin(tl.core.tensor_descriptor_base, builder, scope)
    nothing = NothingToRestore()
    interpreter._patch_lang = lambda fn: nothing


def _remember_types() -> None:
    """Every result makes a new block type, a tuple of its shape as constants, and a table of numpy
    types. All are immutable and there are few different ones.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    core = tl.core
    original_block_init = core.block_type.__init__
    original_np_dtype = interpreter._get_np_dtype
    original_tensor_init = core.tensor.__init__
    block_attributes: dict = {}
    np_dtypes: dict = {}

    def block_init(self, element_ty, shape):
        sizes = tuple([core._unwrap_if_constexpr(size) for size in shape])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        known = block_attributes.get(key)
        if known is None:
            original_block_init(self, element_ty, shape)
            # What tensor.__init__ derives from a type; kept beside it.
            self._constants = (
                core.tuple([core.constexpr(size) for size in self.shape]),
                core.constexpr(self.numel),
            )
            known = block_attributes[key] = dict(self.__dict__)
        self.__dict__.update(known)

    def tensor_init(self, handle, type):
        constants = type.__dict__.get("_constants")
        if constants is None:
            original_tensor_init(self, handle, type)
            return
        self.handle = handle
        self.type = type
        self.dtype = type.element_ty
        self.shape, self.numel = constants

    def get_np_dtype(tt_dtype):
        name = tt_dtype.name
        known = np_dtypes.get(name)
        if known is None:
            known = np_dtypes[name] = original_np_dtype(tt_dtype)
        return known

    core.block_type.__init__ = block_init
    core.tensor.__init__ = tensor_init
    interpreter._get_np_dtype = get_np_dtype


def _skip_unused_overflow_check() -> None:
    """Integer arithmetic is computed a second time in 64 bits for an assertion that only a debug
    build makes.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
