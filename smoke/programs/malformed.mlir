// The shapes of this product do not fit each other, so a parser must refuse it.
module @malformed {
  func.func public @main(%a: tensor<2x3xf32>, %b: tensor<5x2xf32>) -> tensor<2x2xf32> {
    %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<2x3xf32>, tensor<5x2xf32>) -> tensor<2x2xf32>
    return %0 : tensor<2x2xf32>
  }
}
