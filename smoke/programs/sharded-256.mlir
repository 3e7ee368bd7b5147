// A product of two 8192x8192 matrices laid out on 16x16 devices; the compiler adds what moves data.
module @sharded_256 attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 256 : i32} {
  func.func public @main(%a: tensor<8192x8192xbf16> {mhlo.sharding = "{devices=[16,16]<=[256]}"}, %b: tensor<8192x8192xbf16> {mhlo.sharding = "{devices=[16,16]<=[256]}"}) -> (tensor<8192x8192xbf16> {mhlo.sharding = "{devices=[16,16]<=[256]}"}) {
    %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16>
    return %0 : tensor<8192x8192xbf16>
  }
}
