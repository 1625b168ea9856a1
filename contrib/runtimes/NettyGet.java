import io.netty.bootstrap.Bootstrap;
import io.netty.buffer.ByteBuf;
import io.netty.buffer.Unpooled;
import io.netty.channel.Channel;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInitializer;
import io.netty.channel.SimpleChannelInboundHandler;
import io.netty.channel.epoll.EpollEventLoopGroup;
import io.netty.channel.epoll.EpollSocketChannel;
import io.netty.channel.unix.IntegerUnixChannelOption;
import java.nio.charset.StandardCharsets;

/**
 * Gets a page COUNT times with Netty: java -cp "$(./jars.py)" NettyGet.java URL COUNT [option]. With `option` its sockets have
 * IP_LOCAL_PORT_RANGE. Prints requests, failures and seconds, without a first tenth.
 */
public class NettyGet {
    static class Reader extends SimpleChannelInboundHandler<ByteBuf> {
        @Override
        public void channelRead0(ChannelHandlerContext context, ByteBuf page) {}
    }

    public static void main(String[] arguments) throws Exception {
        java.net.URI url = java.net.URI.create(arguments[0]);
        int count = Integer.parseInt(arguments[1]);
        byte[] request = "GET / HTTP/1.0\r\n\r\n".getBytes(StandardCharsets.US_ASCII);
        EpollEventLoopGroup group = new EpollEventLoopGroup(1);
        Bootstrap bootstrap = new Bootstrap().group(group);
        bootstrap.handler(new ChannelInitializer<Channel>() {
            @Override
            protected void initChannel(Channel channel) {
                channel.pipeline().addLast(new Reader());
            }
        });
        if (arguments.length > 2) {
            IntegerUnixChannelOption range = new IntegerUnixChannelOption("IP_LOCAL_PORT_RANGE", 0, 51);
            bootstrap.channel(EpollSocketChannel.class).option(range, 0xFFFF0000);   // the whole range, searched port by port
        } else {
            bootstrap.channel(EpollSocketChannel.class);
        }
        long began = 0;
        int failed = 0;
        for (int number = -(count / 10); number < count; number++) {
            if (number == 0) {
                began = System.nanoTime();
                failed = 0;
            }
            try {
                Channel channel = bootstrap.connect(url.getHost(), url.getPort()).sync().channel();
                channel.writeAndFlush(Unpooled.wrappedBuffer(request)).sync();
                // The server closes.
                channel.closeFuture().sync();
            } catch (Exception error) {
                failed++;
            }
        }
        System.out.println(count + " " + failed + " " + (System.nanoTime() - began) / 1e9);
        System.exit(0);
    }
}
