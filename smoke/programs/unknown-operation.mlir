// No StableHLO has this operation, so a parser must refuse it.
module @unknown_operation {
  func.func public @main(%a: tensor<2x2xf32>) -> tensor<2x2xf32> {
    %0 = stablehlo.no_such_operation %a : tensor<2x2xf32>
    return %0 : tensor<2x2xf32>
  }
}
