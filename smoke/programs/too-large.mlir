// Adds two 512 GiB arrays: more than the memory of any chip, so a compiler must refuse it.
module @too_large {
  func.func public @main(%a: tensor<131072x1048576xf32>, %b: tensor<131072x1048576xf32>) -> tensor<131072x1048576xf32> {
    %0 = stablehlo.add %a, %b : tensor<131072x1048576xf32>
    return %0 : tensor<131072x1048576xf32>
  }
}
