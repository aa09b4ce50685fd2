"""The counter of kernels, on a program written by hand."""

import pytest

from benchmarks.kernels import Program

TEXT = """HloModule jit_advance

%fused (param_0: f32[100,10], param_1: s32[]) -> f32[10] {
  %param_0 = f32[100,10]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,10]{1,0} dynamic-slice(%param_0, %param_1, %zero), dynamic_slice_sizes={1,10}
  ROOT %out = f32[10]{0} bitcast(%row)
}

%time (arg: (s32[], f32[10])) -> (s32[], f32[10]) {
  %arg = (s32[], f32[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[10]{0} get-tuple-element(%arg), index=1
  %y = f32[10]{0} add(%x, %x), metadata={op_name="transpose(jvp())/add"}
  ROOT %next = (s32[], f32[10]{0}) tuple(%i, %y)
}

%steps (arg.1: (s32[], f32[10], f32[100,10])) -> (s32[], f32[10], f32[100,10]) {
  %arg.1 = (s32[], f32[10]{0}, f32[100,10]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %x.1 = f32[10]{0} get-tuple-element(%arg.1), index=1
  %rows = f32[100,10]{1,0} get-tuple-element(%arg.1), index=2
  %row.1 = f32[10]{0} fusion(%rows, %i.1), kind=kLoop, calls=%fused
  %start = (s32[], f32[10]{0}) tuple(%i.1, %row.1)
  %loop = (s32[], f32[10]{0}) while(%start), body=%time, backend_config=TIMES_8
  %g = f32[10]{0} get-tuple-element(%loop), index=1
  %gemm = (f32[10]{0}, s8[4096]{0}) custom-call(%g, %x.1), TARGET, op_name="transpose(jvp())"
  %w = f32[10]{0} get-tuple-element(%gemm), index=0
  ROOT %next.1 = (s32[], f32[10]{0}, f32[100,10]{1,0}) tuple(%i.1, %w, %rows)
}

ENTRY %main (p: (s32[], f32[10], f32[100,10])) -> (s32[], f32[10], f32[100,10]) {
  %p = (s32[], f32[10]{0}, f32[100,10]{1,0}) parameter(0)
  %zeros = f32[10]{0} broadcast(%p), metadata={op_name="transpose(jvp())/zeros"}
  ROOT %all = (s32[], f32[10]{0}, f32[100,10]{1,0}) while(%p), condition=%c, body=%steps
}
""".replace("TIMES_8", '{"known_trip_count":{"n":"8"}}').replace("TARGET", '"__cublas$gemm"')


def test_kernels_and_bytes_of_a_step_are_counted() -> None:
    step = Program(TEXT).step()
    # A row of 10 numbers, eight additions of the inner loop, and one product.
    assert (step.kernels, step.library, step.known) == (1 + 8 + 1, 1, False)
    row, add, product = (40 + 4 + 40), 3 * 40, 3 * 40
    assert step.mb * 1e6 == row + 8 * add + product


def test_a_program_without_training_is_rejected() -> None:
    with pytest.raises(ValueError, match="loop over local steps"):
        Program(TEXT.replace("transpose", "")).step()
