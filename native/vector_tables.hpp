// The kernels of one instruction set, by dtype. Included like vector_types.hpp, but outside the unnamed namespace.

const AdamKernels adam_kernels = {{inspect<Fp32>, inspect<Bf16>, inspect<Fp16>},
                                  {{step<Fp32, Fp32>, step<Fp32, Bf16>, step<Fp32, Fp16>},
                                   {step<Bf16, Fp32>, step<Bf16, Bf16>, step<Bf16, Fp16>},
                                   {step<Fp16, Fp32>, step<Fp16, Bf16>, step<Fp16, Fp16>}},
                                  {{logged_step<Fp32, Fp32>, logged_step<Fp32, Bf16>, logged_step<Fp32, Fp16>},
                                   {logged_step<Bf16, Fp32>, logged_step<Bf16, Bf16>, logged_step<Bf16, Fp16>},
                                   {logged_step<Fp16, Fp32>, logged_step<Fp16, Bf16>, logged_step<Fp16, Fp16>}},
                                  {undo<Fp32>, undo<Bf16>, undo<Fp16>},
                                  {round_weight<Fp32>, round_weight<Bf16>, round_weight<Fp16>},
                                  {copy<false>, copy<true>},
                                  publish};

const StreamKernels stream_kernels = {{same_streams<false, false>, same_streams<false, true>, same_streams<true, true>},
                                      {triad<false>, triad<true>}};
