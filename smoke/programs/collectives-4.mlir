// Five collectives among 4 devices, each of which runs this program.
module @collectives_4 attributes {mhlo.num_replicas = 4 : i32, mhlo.num_partitions = 1 : i32} {
  func.func public @main(%a: tensor<1024x512xf32>) -> (tensor<1024x512xf32>, tensor<4096x512xf32>, tensor<256x512xf32>, tensor<256x2048xf32>, tensor<1024x512xf32>) {
    %sum = "stablehlo.all_reduce"(%a) <{replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> ({
      ^bb0(%x: tensor<f32>, %y: tensor<f32>):
        %s = stablehlo.add %x, %y : tensor<f32>
        stablehlo.return %s : tensor<f32>
    }) : (tensor<1024x512xf32>) -> tensor<1024x512xf32>
    %all = "stablehlo.all_gather"(%a) <{all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> : (tensor<1024x512xf32>) -> tensor<4096x512xf32>
    %part = "stablehlo.reduce_scatter"(%a) <{scatter_dimension = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> ({
      ^bb0(%x: tensor<f32>, %y: tensor<f32>):
        %s = stablehlo.add %x, %y : tensor<f32>
        stablehlo.return %s : tensor<f32>
    }) : (tensor<1024x512xf32>) -> tensor<256x512xf32>
    %turned = "stablehlo.all_to_all"(%a) <{split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> : (tensor<1024x512xf32>) -> tensor<256x2048xf32>
    %next = "stablehlo.collective_permute"(%a) <{source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>}> : (tensor<1024x512xf32>) -> tensor<1024x512xf32>
    return %sum, %all, %part, %turned, %next : tensor<1024x512xf32>, tensor<4096x512xf32>, tensor<256x512xf32>, tensor<256x2048xf32>, tensor<1024x512xf32>
  }
}
